/* Reads the rows of scans; a scan can be given up while the store does not answer. */
#include "helper.h"

#include <stdlib.h>
#include <string.h>

/* Rows that are asked for at once where their bytes have a limit. Asking costs half as much as a short
 * row does, so it is many where the limit leaves room for some that are long. */
enum { FEW_ROWS = 4, MANY_ROWS = 16, MANY_BYTES = 4 * 1024 * 1024 };

static RustBuffer copied(const Symbols *s, const uint8_t *bytes, uint64_t size,
                         RustCallStatus *status) {
    RustBuffer buffer = s->rustbuffer_alloc(size, status);
    if (status->code != CALL_SUCCESS) return buffer;
    memcpy(buffer.data, bytes, size);
    buffer.len = size;
    return buffer;
}

/* SlateDB retries for ever, so a scan that has no caller any more has to be ended, or its thread would
 * never come back. */
void give_up(Scan *scan) {
    scan->given_up = 1;
    if (scan->cancel) scan->cancel(scan->future);
}

static void set_driven(Scan *scan, uint64_t future, void (*cancel)(uint64_t)) {
    pthread_mutex_lock(scan->mutex);
    scan->future = future;
    scan->cancel = cancel;
    if (scan->given_up && cancel) cancel(future);
    pthread_mutex_unlock(scan->mutex);
}

/* `drive` for a scan that may be given up meanwhile: then the future is ready at once, and completes
 * with CALL_CANCELLED. */
static void drive_scan(Scan *scan, void (*poll)(uint64_t, Continuation, uint64_t),
                       void (*cancel)(uint64_t), uint64_t future) {
    set_driven(scan, future, cancel);
    drive(poll, future);
    set_driven(scan, 0, NULL);
}

static int scan_result(const RustCallStatus *status) {
    if (status->code == CALL_CANCELLED) return ODQ_GIVEN_UP;
    return status->code == CALL_SUCCESS ? ODQ_OK : ODQ_FAILED;
}

/* The next `count` rows of an iterator, as the binding's `next_batch` returns them. */
static int next_batch(const Symbols *s, Scan *scan, uint64_t iterator, uint32_t count,
                      RustBuffer *rows, RustCallStatus *status) {
    const uint64_t own = s->clone_dbiterator(iterator, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = s->dbiterator_next_batch(own, count);
    drive_scan(scan, s->poll_rust_buffer, s->cancel_rust_buffer, future);
    *rows = s->complete_rust_buffer(future, status);
    s->free_rust_buffer(future);
    return scan_result(status);
}

/* How many rows to ask for, so that few are read beyond `max_bytes` when long ones follow short
 * ones: more of them while they are short, and not more than fit if they are as long as the last. */
static uint32_t next_count(const Scan *scan, uint32_t count, uint64_t size, uint32_t asked,
                           uint64_t added) {
    const uint32_t left = scan->limit - count;
    const uint32_t most = scan->max_bytes < MANY_BYTES ? FEW_ROWS : MANY_ROWS;
    const uint64_t fitting = (scan->max_bytes - size) / (added / asked + 1);
    uint64_t wanted = 2 * asked;
    if (wanted > most) wanted = most;
    if (wanted > fitting) wanted = fitting ? fitting : 1;
    return wanted > left ? left : (uint32_t)wanted;
}

/* The next `limit` rows of an iterator, or fewer if they have `max_bytes` before. SlateDB takes no such
 * limit, and one row can be as long as thousands of others: so it is asked for some at a time. */
int next_rows(const Symbols *s, Scan *scan, uint64_t iterator, Outcome *out) {
    uint8_t *all = NULL;
    uint64_t size = LENGTH_BYTES, capacity = 0;
    uint32_t count = 0, wanted = scan->limit < FEW_ROWS ? scan->limit : FEW_ROWS;
    int result;
    for (;;) {
        RustBuffer some = {0};
        RustCallStatus ignored = {0};
        result = next_batch(s, scan, iterator, wanted, &some, &out->status);
        if (result != ODQ_OK) break;
        const uint64_t added = some.len - LENGTH_BYTES;
        const uint32_t found = (uint32_t)read_be(some.data, LENGTH_BYTES);
        out->has_more = found == wanted;
        const int is_last = !out->has_more || count + found >= scan->limit
                            || size + added >= scan->max_bytes;
        if (is_last && !count) { /* there is nothing to put together */
            out->rows = some;
            return ODQ_OK;
        }
        if (size + added > capacity) {
            capacity = 2 * (size + added);
            uint8_t *larger = realloc(all, capacity);
            if (!larger) result = ODQ_NO_MEMORY;
            else all = larger;
        }
        if (result == ODQ_OK) memcpy(all + size, some.data + LENGTH_BYTES, added);
        s->rustbuffer_free(some, &ignored);
        size += added;
        count += found;
        if (result != ODQ_OK || is_last) break;
        wanted = next_count(scan, count, size, wanted, added);
    }
    if (result == ODQ_OK) {
        write_be(all, count, LENGTH_BYTES);
        out->rows = copied(s, all, size, &out->status);
        if (out->status.code != CALL_SUCCESS) result = ODQ_FAILED;
    }
    free(all);
    return result;
}

/* The first `limit` rows of a range, as the binding's `next_batch` returns them, or fewer if they have
 * `max_bytes` before. Range and options are in `bytes`, one after the other, serialised as uniffi does
 * it. */
int first_rows(const Symbols *s, Scan *scan, uint64_t handle, int32_t flags, const uint8_t *bytes,
               uint64_t range_size, uint64_t size, Outcome *out) {
    RustCallStatus *status = &out->status;
    const int of_reader = flags & JOB_OF_READER;
    RustCallStatus ignored = {0};
    const RustBuffer range = copied(s, bytes, range_size, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const RustBuffer options = copied(s, bytes + range_size, size - range_size, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t own = (of_reader ? s->clone_dbreader : s->clone_db)(handle, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = (of_reader ? s->dbreader_scan : s->db_scan)(own, range, options);
    drive_scan(scan, s->poll_u64, s->cancel_u64, future);
    const uint64_t iterator = s->complete_u64(future, status);
    s->free_u64(future);
    if (status->code != CALL_SUCCESS) return scan_result(status);
    const int result = next_rows(s, scan, iterator, out);
    if (result == ODQ_OK && out->has_more && read_be(out->rows.data, LENGTH_BYTES) < scan->limit)
        out->iterator = iterator;
    else s->free_dbiterator(iterator, &ignored);
    return result;
}
