/* What the helper was compiled with, for Python to compare with its own. */
#include "helper.h"

/* Compared before the first write: the version, and sizes and offsets of what both sides share. */
EXPORT uint32_t odq_layout(uint32_t *out, uint32_t capacity) {
    const uint32_t layout[] = {
        ODQ_ABI, sizeof(RustBuffer), offsetof(RustBuffer, len), offsetof(RustBuffer, data),
        sizeof(RustCallStatus), offsetof(RustCallStatus, error_buf), sizeof(Symbols), HEADER_BYTES,
        sizeof(WalSync), offsetof(WalSync, descriptor), offsetof(WalSync, error_number),
        offsetof(WalSync, next), sizeof(Outcome), offsetof(Outcome, result),
        offsetof(Outcome, status), offsetof(Outcome, rows), offsetof(Outcome, iterator),
        offsetof(Outcome, has_more), sizeof(Append), offsetof(Append, descriptor),
        offsetof(Append, flags), offsetof(Append, offset),
    };
    const uint32_t count = sizeof layout / sizeof *layout;
    for (uint32_t i = 0; i < count && i < capacity; i++) out[i] = layout[i];
    return count;
}

/* Every name that Python mirrors with its number, a line for each. */
EXPORT const char *odq_numbers(void) {
    return ODQ_RESULTS(ODQ_AS_TEXT) ODQ_JOB_FLAGS(ODQ_AS_TEXT) ODQ_OPS(ODQ_AS_TEXT)
        ODQ_LIMITS(ODQ_AS_TEXT);
}
