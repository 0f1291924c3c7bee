#include "attention.h"

DEFINE_ATTEND(kv8_f32, float, int8_t)
