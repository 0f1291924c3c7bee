#include "attention.h"

DEFINE_ATTEND(f32, float, float)
