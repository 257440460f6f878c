/* Writes a packed batch of rows to SlateDB through the C symbols of its Python binding.
 *
 * A plain shared library without Python headers: ctypes loads it and releases the GIL for the
 * length of each call. It links against nothing of SlateDB; the caller hands over the addresses.
 * It keeps no state, so any number of threads may call it at once.
 *
 * The rows' layout is stated in rows.py, the meaning of the symbols in batch_writer.py. Whatever is
 * changed here in a signature, a structure or a number must raise ODQ_ABI in both files.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ODQ_ABI 1
#define EXPORT __attribute__((visibility("default")))

/* uniffi 0.31, contract version 30 */
typedef struct { uint64_t capacity, len; uint8_t *data; } RustBuffer;
typedef struct { int8_t code; RustBuffer error_buf; } RustCallStatus;
typedef void (*Continuation)(uint64_t data, int8_t poll_code);
enum { CALL_SUCCESS = 0, POLL_READY = 0 };

typedef struct {
    RustBuffer (*rustbuffer_alloc)(uint64_t size, RustCallStatus *);
    uint64_t (*clone_db)(uint64_t, RustCallStatus *);
    uint64_t (*writebatch_new)(RustCallStatus *);
    uint64_t (*clone_writebatch)(uint64_t, RustCallStatus *);
    void (*free_writebatch)(uint64_t, RustCallStatus *);
    void (*free_writehandle)(uint64_t, RustCallStatus *);
    void (*writebatch_put)(uint64_t, RustBuffer, RustBuffer, RustCallStatus *);
    void (*writebatch_put_with_options)(uint64_t, RustBuffer, RustBuffer, RustBuffer,
                                        RustCallStatus *);
    void (*writebatch_delete)(uint64_t, RustBuffer, RustCallStatus *);
    uint64_t (*db_write)(uint64_t db, uint64_t batch);
    uint64_t (*db_flush)(uint64_t db);
    void (*poll_u64)(uint64_t future, Continuation, uint64_t data);
    uint64_t (*complete_u64)(uint64_t future, RustCallStatus *);
    void (*free_u64)(uint64_t future);
    void (*poll_void)(uint64_t future, Continuation, uint64_t data);
    void (*complete_void)(uint64_t future, RustCallStatus *);
    void (*free_void)(uint64_t future);
} Symbols;

/* Return codes of the exported functions. */
enum { ODQ_OK = 0, ODQ_FAILED = 1, ODQ_MALFORMED = 2 };

enum { OP_PUT = 1, OP_PUT_TTL = 2, OP_DELETE = 3, HEADER_BYTES = 16, LENGTH_BYTES = 4 };
enum { TTL_EXPIRE_AFTER_MILLIS = 3, TTL_BYTES = 12 };

/* What this file was compiled to believe, for the caller to compare before its first write. */
EXPORT uint32_t odq_layout(uint32_t *out, uint32_t capacity) {
    const uint32_t layout[] = {
        ODQ_ABI, sizeof(RustBuffer), offsetof(RustBuffer, len), offsetof(RustBuffer, data),
        sizeof(RustCallStatus), offsetof(RustCallStatus, error_buf), sizeof(Symbols), HEADER_BYTES,
    };
    const uint32_t count = sizeof layout / sizeof *layout;
    for (uint32_t i = 0; i < count && i < capacity; i++) out[i] = layout[i];
    return count;
}

static uint64_t read_le(const uint8_t *at, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

static void write_be(uint8_t *at, uint64_t value, unsigned bytes) {
    while (bytes--) { at[bytes] = (uint8_t)value; value >>= 8; }
}

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

typedef struct { pthread_mutex_t mutex; pthread_cond_t woken; int is_woken; int8_t code; } Waiter;

/* Runs on any thread, or inside the poll itself. It signals under the mutex: the waiter lives on
 * the stack of a thread that may return, and destroy it, as soon as the mutex is free. */
static void wake(uint64_t data, int8_t poll_code) {
    Waiter *waiter = (Waiter *)(uintptr_t)data;
    pthread_mutex_lock(&waiter->mutex);
    waiter->code = poll_code;
    waiter->is_woken = 1;
    pthread_cond_signal(&waiter->woken);
    pthread_mutex_unlock(&waiter->mutex);
}

/* Blocks until the future is ready. Rust calls the continuation exactly once for each poll, so no
 * call can come after this function has returned; "maybe ready" means to poll again. */
static void drive(void (*poll)(uint64_t, Continuation, uint64_t), uint64_t future) {
    Waiter waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, POLL_READY};
    do {
        waiter.is_woken = 0;
        poll(future, wake, (uint64_t)(uintptr_t)&waiter);
        pthread_mutex_lock(&waiter.mutex);
        while (!waiter.is_woken) pthread_cond_wait(&waiter.woken, &waiter.mutex);
        pthread_mutex_unlock(&waiter.mutex);
    } while (waiter.code != POLL_READY);
    pthread_cond_destroy(&waiter.woken);
    pthread_mutex_destroy(&waiter.mutex);
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
 * asked, flushes; blocks until that is done. `db` stays the caller's. On ODQ_FAILED, `status` holds
 * the error and its buffer, which the caller frees. */
EXPORT int32_t odq_write(const Symbols *s, uint64_t db, const uint8_t *rows, uint64_t size,
                         int32_t then_flush, RustCallStatus *status) {
    int result = ODQ_OK;
    if (size) result = write_rows(s, db, rows, (size_t)size, status);
    if (result == ODQ_OK && then_flush) result = flush(s, db, status);
    return result;
}
