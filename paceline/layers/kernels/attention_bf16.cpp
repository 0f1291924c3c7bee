#include "attention.h"

DEFINE_ATTEND(bf16, bf16, bf16)
