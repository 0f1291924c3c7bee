#include "attention.h"

DEFINE_ATTEND(kv8_bf16, bf16, int8_t)
