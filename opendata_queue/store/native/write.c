/* Writes packed rows to SlateDB as one batch, and makes them durable. */
#include "helper.h"

#include <string.h>

enum { TTL_EXPIRE_AFTER_MILLIS = 3, TTL_BYTES = 12 };

/* A byte string as uniffi passes it: length i32 big-endian, then the bytes. */
static RustBuffer lower_bytes(const Symbols *s, const uint8_t *bytes, uint32_t size,
                              RustCallStatus *status) {
    RustBuffer buffer = s->rustbuffer_alloc((uint64_t)size + LENGTH_BYTES, status);
    if (status->code != CALL_SUCCESS) return buffer;
    write_be(buffer.data, size, LENGTH_BYTES);
    if (size) memcpy(buffer.data + LENGTH_BYTES, bytes, size);
    buffer.len = (uint64_t)size + LENGTH_BYTES;
    return buffer;
}

/* PutOptions{ttl: Ttl::ExpireAfterMillis}: variant i32, milliseconds u64, both big-endian. */
static RustBuffer lower_ttl(const Symbols *s, uint64_t ttl_ms, RustCallStatus *status) {
    RustBuffer buffer = s->rustbuffer_alloc(TTL_BYTES, status);
    if (status->code != CALL_SUCCESS) return buffer;
    write_be(buffer.data, TTL_EXPIRE_AFTER_MILLIS, 4);
    write_be(buffer.data + 4, ttl_ms, 8);
    buffer.len = TTL_BYTES;
    return buffer;
}

typedef struct { uint8_t op; uint32_t key_size, value_size; uint64_t ttl_ms;
                 const uint8_t *key, *value; } Row;

/* Bytes of the row at `at`, or 0 if it is not whole or not known. */
static size_t read_row(const uint8_t *at, size_t left, Row *row) {
    if (left < HEADER_BYTES) return 0;
    row->op = at[0];
    row->key_size = (uint32_t)read_le(at + 2, 2);
    row->value_size = (uint32_t)read_le(at + 4, 4);
    row->ttl_ms = read_le(at + 8, 8);
    row->key = at + HEADER_BYTES;
    row->value = row->key + row->key_size;
    const uint64_t size = (uint64_t)HEADER_BYTES + row->key_size + row->value_size;
    if (size > left || row->op < OP_PUT || row->op > OP_DELETE) return 0;
    return (size_t)size;
}

/* An allocation fails only by a panic in Rust; what was allocated before it is then leaked. */
static void add_row(const Symbols *s, uint64_t batch, const Row *row, RustCallStatus *status) {
    RustBuffer key = lower_bytes(s, row->key, row->key_size, status), value, options;
    if (status->code != CALL_SUCCESS) return;
    if (row->op != OP_DELETE) {
        value = lower_bytes(s, row->value, row->value_size, status);
        if (status->code != CALL_SUCCESS) return;
    }
    if (row->op == OP_PUT_TTL) {
        options = lower_ttl(s, row->ttl_ms, status);
        if (status->code != CALL_SUCCESS) return;
    }
    /* Every method consumes the handle it is given, and its buffers, whether it fails or not. */
    const uint64_t own = s->clone_writebatch(batch, status);
    if (status->code != CALL_SUCCESS) return;
    switch (row->op) {
    case OP_PUT: s->writebatch_put(own, key, value, status); break;
    case OP_PUT_TTL: s->writebatch_put_with_options(own, key, value, options, status); break;
    default: s->writebatch_delete(own, key, status);
    }
}

static int add_rows(const Symbols *s, uint64_t batch, const uint8_t *at, size_t left,
                    RustCallStatus *status) {
    Row row;
    while (left) {
        const size_t size = read_row(at, left, &row);
        if (!size) return ODQ_MALFORMED;
        add_row(s, batch, &row, status);
        if (status->code != CALL_SUCCESS) return ODQ_FAILED;
        at += size;
        left -= size;
    }
    return ODQ_OK;
}

static int write_batch(const Symbols *s, uint64_t db, uint64_t batch, RustCallStatus *status) {
    RustCallStatus ignored = {0};
    const uint64_t own_db = s->clone_db(db, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t own_batch = s->clone_writebatch(batch, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = s->db_write(own_db, own_batch);
    drive(s->poll_u64, future);
    const uint64_t handle = s->complete_u64(future, status);
    s->free_u64(future);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    s->free_writehandle(handle, &ignored);
    return ODQ_OK;
}

static int flush(const Symbols *s, uint64_t db, RustCallStatus *status) {
    const uint64_t own_db = s->clone_db(db, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = s->db_flush(own_db);
    drive(s->poll_void, future);
    s->complete_void(future, status);
    s->free_void(future);
    return status->code == CALL_SUCCESS ? ODQ_OK : ODQ_FAILED;
}

static int write_rows(const Symbols *s, uint64_t db, const uint8_t *rows, size_t size,
                      RustCallStatus *status) {
    RustCallStatus ignored = {0};
    const uint64_t batch = s->writebatch_new(status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    int result = add_rows(s, batch, rows, size, status);
    if (result == ODQ_OK) result = write_batch(s, db, batch, status);
    s->free_writebatch(batch, &ignored);
    return result;
}

/* Writes all rows as one batch (none if there are no rows: SlateDB refuses an empty batch) and, if
 * asked, flushes, and syncs the WAL files unless `wal` is NULL; blocks until that is done. `db` stays
 * the caller's. On ODQ_FAILED, `status` holds the error and its buffer, which the caller frees; on
 * ODQ_NOT_SYNCED, `wal` has the error's number. */
int write_durably(const Symbols *s, uint64_t db, const uint8_t *rows, uint64_t size, int32_t flags,
                  WalSync *wal, RustCallStatus *status) {
    int result = ODQ_OK;
    if (size) result = write_rows(s, db, rows, (size_t)size, status);
    if (result == ODQ_OK && flags & JOB_FLUSH) result = flush(s, db, status);
    if (result == ODQ_OK && wal) result = sync_wal(wal);
    return result;
}

EXPORT int32_t odq_write(const Symbols *s, uint64_t db, const uint8_t *rows, uint64_t size,
                         int32_t flags, WalSync *wal, RustCallStatus *status) {
    return write_durably(s, db, rows, size, flags, wal, status);
}
