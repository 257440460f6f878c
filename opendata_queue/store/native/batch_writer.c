/* Writes packed batches of rows to SlateDB through the C symbols of its Python binding, makes them
 * durable, appends them to journals, and reads the rows of scans. Weaves columns into rows, and takes
 * the rows of a log apart into columns.
 *
 * Two ways to ask for it. `odq_write` does all in one call that blocks, so the thread that calls
 * needs the GIL only before and after it. `odq_submit_write` and
 * those after it hand a job to a thread of this library and return; when it is done, it is put
 * into a mailbox, whose descriptor wakes an event loop. No Python thread is needed then, and none has
 * to wait for the GIL while the event loop is busy.
 *
 * A plain shared library without Python headers: ctypes loads it and releases the GIL for the
 * length of each call. It links against nothing of SlateDB; the caller hands over the addresses.
 * Its only state are the pools of threads. Any number of threads may call it at once.
 *
 * The rows' layout is stated in rows.py, the meaning of the symbols in batch_writer.py. Whatever is
 * changed here in a signature, a structure or a number must raise ODQ_ABI in both files.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#define fdatasync fsync
#endif

#define ODQ_ABI 9
#define EXPORT __attribute__((visibility("default")))

/* uniffi 0.31, contract version 30 */
typedef struct { uint64_t capacity, len; uint8_t *data; } RustBuffer;
typedef struct { int8_t code; RustBuffer error_buf; } RustCallStatus;
typedef void (*Continuation)(uint64_t data, int8_t poll_code);
enum { CALL_SUCCESS = 0, CALL_CANCELLED = 3, POLL_READY = 0 };

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
    void (*rustbuffer_free)(RustBuffer, RustCallStatus *);
    void (*free_db)(uint64_t, RustCallStatus *);
    uint64_t (*db_scan)(uint64_t db, RustBuffer range, RustBuffer options);
    uint64_t (*clone_dbreader)(uint64_t, RustCallStatus *);
    void (*free_dbreader)(uint64_t, RustCallStatus *);
    uint64_t (*dbreader_scan)(uint64_t reader, RustBuffer range, RustBuffer options);
    uint64_t (*clone_dbiterator)(uint64_t, RustCallStatus *);
    void (*free_dbiterator)(uint64_t, RustCallStatus *);
    uint64_t (*dbiterator_next_batch)(uint64_t iterator, uint32_t rows);
    void (*poll_rust_buffer)(uint64_t future, Continuation, uint64_t data);
    RustBuffer (*complete_rust_buffer)(uint64_t future, RustCallStatus *);
    void (*free_rust_buffer)(uint64_t future);
    void (*cancel_u64)(uint64_t future);
    void (*cancel_rust_buffer)(uint64_t future);
} Symbols;

/* Return codes of the exported functions. */
enum { ODQ_OK = 0, ODQ_FAILED = 1, ODQ_MALFORMED = 2, ODQ_NOT_SYNCED = 3, ODQ_NO_WAL = 4,
       ODQ_NO_MEMORY = 5, ODQ_NO_THREAD = 6, ODQ_GIVEN_UP = 7, ODQ_FENCED = 8,
       ODQ_NOT_WRITTEN = 9 };

/* The WAL files to sync after a flush: `folder`/`next`.sst and those after it, then the folder
 * itself, which `descriptor` is open on. `next` is moved on; durable_files.py says why that is all. */
typedef struct { const char *folder; int32_t descriptor, error_number; uint64_t next; } WalSync;

/* Where a record goes: into the file `descriptor` is open on, at `offset`, synced if asked. `next` is
 * the file that whoever takes over makes first. journal.py says why that is all there is to look at. */
typedef struct { const char *next; int32_t descriptor, then_sync; uint64_t offset; } Append;

/* What has become of a job. On ODQ_FAILED `status` holds the error; `rows` is what a scan has
 * found. Both buffers are the receiver's to free. */
typedef struct { uint64_t number, wal_next; int32_t result, error_number; RustCallStatus status;
                 RustBuffer rows; } Outcome;

enum { OP_PUT = 1, OP_PUT_TTL = 2, OP_DELETE = 3, HEADER_BYTES = 16, LENGTH_BYTES = 4 };
enum { TTL_EXPIRE_AFTER_MILLIS = 3, TTL_BYTES = 12 };
enum { MOST_COLUMNS = 32, SIZE_BYTES = 4 };
enum { FEW_ROWS = 4, COUNT_BYTES = 4 };

/* What this file was compiled to believe, for the caller to compare before its first write. */
EXPORT uint32_t odq_layout(uint32_t *out, uint32_t capacity) {
    const uint32_t layout[] = {
        ODQ_ABI, sizeof(RustBuffer), offsetof(RustBuffer, len), offsetof(RustBuffer, data),
        sizeof(RustCallStatus), offsetof(RustCallStatus, error_buf), sizeof(Symbols), HEADER_BYTES,
        sizeof(WalSync), offsetof(WalSync, descriptor), offsetof(WalSync, error_number),
        offsetof(WalSync, next), sizeof(Outcome), offsetof(Outcome, result),
        offsetof(Outcome, status), offsetof(Outcome, rows), sizeof(Append),
        offsetof(Append, descriptor), offsetof(Append, then_sync), offsetof(Append, offset),
    };
    const uint32_t count = sizeof layout / sizeof *layout;
    for (uint32_t i = 0; i < count && i < capacity; i++) out[i] = layout[i];
    return count;
}

/* Where a column is read: `width` bytes for each row, the same again if it is below 0, or as many as
 * `sizes` say for each row if it is 0. */
typedef struct { const uint8_t *at, *sizes; int64_t width; } Column;

static uint64_t width_of(const Column *column, uint64_t row) {
    uint32_t size;
    if (column->width) return (uint64_t)(column->width < 0 ? -column->width : column->width);
    memcpy(&size, column->sizes + SIZE_BYTES * row, SIZE_BYTES);
    return size;
}

/* Finds the columns in `data`, where they follow each other; returns the bytes of all rows, or
 * UINT64_MAX if they are not all there, or not all that is there. No sum overflows: what a column has
 * is bounded by `size`, and what is the same in all rows by `most`. */
static uint64_t find_columns(Column *columns, uint32_t how_many, uint64_t count, const uint8_t *data,
                             uint64_t size, uint64_t most) {
    uint64_t taken = 0, total = 0;
    for (Column *column = columns; column < columns + how_many; column++) {
        uint64_t own = 0, each = 0;
        if (!column->width) {
            if (count > (size - taken) / SIZE_BYTES) return UINT64_MAX;
            column->sizes = data + taken;
            taken += SIZE_BYTES * count;
            for (uint64_t row = 0; row < count; row++) own += width_of(column, row);
        } else {
            each = width_of(column, 0);
            if (each > (column->width < 0 ? most : size) / count) return UINT64_MAX;
            own = column->width < 0 ? each : each * count;
        }
        if (own > size - taken) return UINT64_MAX;
        column->at = data + taken;
        taken += own;
        total += column->width < 0 ? each * count : own;
    }
    return taken == size ? total : UINT64_MAX;
}

/* Joins `count` rows, each of which has its bytes of every column, to the `out_size` bytes at `out`.
 * weaving.py says what `widths` mean. ODQ_MALFORMED: the columns have other rows than that. */
EXPORT int32_t odq_weave(const int64_t *widths, uint32_t how_many, uint64_t count, const uint8_t *data,
                         uint64_t size, uint8_t *out, uint64_t out_size) {
    Column columns[MOST_COLUMNS] = {{0}};
    if (how_many > MOST_COLUMNS || !count) return ODQ_MALFORMED;
    for (uint32_t i = 0; i < how_many; i++) columns[i].width = widths[i];
    if (find_columns(columns, how_many, count, data, size, out_size) != out_size) return ODQ_MALFORMED;
    for (uint64_t row = 0; row < count; row++) {
        for (Column *column = columns; column < columns + how_many; column++) {
            const uint64_t width = width_of(column, row);
            memcpy(out, column->at, width);
            out += width;
            if (column->width >= 0) column->at += width;
        }
    }
    return ODQ_OK;
}

static uint64_t read_le(const uint8_t *at, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

static void write_be(uint8_t *at, uint64_t value, unsigned bytes) {
    while (bytes--) { at[bytes] = (uint8_t)value; value >>= 8; }
}

static uint64_t read_be(const uint8_t *at, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *at++;
    return value;
}

/* --- the log by column ---------------------------------------------------------------------------- */

/* RFC 0001, Metadata log entry: four integers of 8 bytes, one of 4, and the number of headers. */
enum { METADATA_LONGS = 4, METADATA_FIXED = 37, TEXT_LENGTH = 2 };
/* uniffi's KeyValue: behind the value a sequence number, when it was made, and whether it expires. */
enum { ROW_TAIL = 17, ROW_EXPIRY = 8 };

/* Whether bytes are UTF-8 as Python's strict decoder wants them: no surrogates, nothing too long. */
static int is_utf8(const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        if (end - at >= 8 && !(read_le(at, 8) & 0x8080808080808080u)) { at += 8; continue; }
        const uint8_t first = *at++;
        if (first < 0x80) continue;
        const unsigned more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        if (first < 0xC2 || first > 0xF4 || end - at < (ptrdiff_t)more) return 0;
        const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*at < low || *at > high) return 0;
        for (unsigned i = 1; i < more; i++) if ((at[i] & 0xC0) != 0x80) return 0;
        at += more;
    }
    return 1;
}

/* The text at `at`: behind it, or NULL if it is not whole or no text. */
static const uint8_t *behind_text(const uint8_t *at, const uint8_t *end) {
    if (end - at < TEXT_LENGTH) return NULL;
    const uint64_t size = read_le(at, TEXT_LENGTH);
    at += TEXT_LENGTH;
    return (uint64_t)(end - at) >= size && is_utf8(at, at + size) ? at + size : NULL;
}

/* Whether a header's key, with its length before it, is among the names, which are encoded alike. */
static int is_wanted(const uint8_t *key, const uint8_t *names, const uint8_t *names_end) {
    const uint64_t size = TEXT_LENGTH + read_le(key, TEXT_LENGTH);
    while (names < names_end) {
        const uint64_t its_size = TEXT_LENGTH + read_le(names, TEXT_LENGTH);
        if (its_size == size && !memcmp(names, key, size)) return 1;
        names += its_size;
    }
    return 0;
}

/* Copies the wanted headers of a record to `out`, back to back; behind them, or NULL if the record
 * is not right in every respect. No names at all stand for all headers. */
static uint8_t *wanted_headers(const uint8_t *at, const uint8_t *end, unsigned count,
                               const uint8_t *names, const uint8_t *names_end, uint8_t *out) {
    while (count--) {
        const uint8_t *key = at, *value = behind_text(at, end);
        if (!value || !(at = behind_text(value, end))) return NULL;
        if (names && !is_wanted(key, names, names_end)) continue;
        memcpy(out, key, (size_t)(at - key));
        out += at - key;
    }
    return at == end ? out : NULL;
}

/* Headers that were met: where they are, their size, and their number plus one. */
typedef struct { const uint8_t *at; uint32_t size, number; } Kind;

static uint32_t kind_of(Kind *kinds, uint64_t mask, const uint8_t *at, uint32_t size, uint32_t next) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < size; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
    for (hash ^= hash >> 32;; hash++) {
        Kind *kind = kinds + (hash & mask);
        if (!kind->number) {
            *kind = (Kind){at, size, next + 1};
            return next;
        }
        if (kind->size == size && !memcmp(kind->at, at, size)) return kind->number - 1;
    }
}

/* The values of a scan of the log, by column. `data` is a sequence of rows as uniffi writes it, of
 * which there must be `count`. `longs` gets message id, created, received and visible at, a column
 * after the other, `retentions` one number for each row, and `numbers` which headers a row has: of
 * these each is once in `headers`, one after the other, `sizes` bytes long, `how_many` in all.
 *
 * Only headers with one of the `names` are taken, each of these with its length before it; all if
 * `names` is NULL. ODQ_MALFORMED: something is not right; the caller finds out what. */
EXPORT int32_t odq_read_log(const uint8_t *data, uint64_t size, uint32_t count, const uint8_t *names,
                            uint64_t names_size, uint64_t *longs, uint32_t *retentions,
                            uint32_t *numbers, uint32_t *sizes, uint8_t *headers,
                            uint32_t *how_many) {
    const uint8_t *at = data + LENGTH_BYTES, *const end = data + size;
    uint64_t mask = 1;
    *how_many = 0;
    if (size < LENGTH_BYTES || read_be(data, LENGTH_BYTES) != count) return ODQ_MALFORMED;
    while (mask < 2 * (uint64_t)count) mask *= 2;
    Kind *kinds = calloc(mask--, sizeof *kinds);
    if (!kinds) return ODQ_NO_MEMORY;
    int result = ODQ_MALFORMED;
    for (uint32_t row = 0; row < count; row++) {
        for (int of_value = 0; of_value < 2; of_value++) { /* past the key, then to the value */
            if (end - at < LENGTH_BYTES) goto done;
            const uint64_t its_size = read_be(at, LENGTH_BYTES);
            at += LENGTH_BYTES;
            if ((uint64_t)(end - at) < its_size) goto done;
            if (!of_value) { at += its_size; continue; }
            const uint8_t *const behind = at + its_size;
            if (its_size < METADATA_FIXED) goto done;
            for (unsigned i = 0; i < METADATA_LONGS; i++)
                longs[(uint64_t)i * count + row] = read_le(at + 8 * i, 8);
            retentions[row] = (uint32_t)read_le(at + 8 * METADATA_LONGS, 4);
            uint8_t *const taken = wanted_headers(at + METADATA_FIXED, behind, at[METADATA_FIXED - 1],
                                                  names, names + names_size, headers);
            if (!taken) goto done;
            const uint32_t taken_size = (uint32_t)(taken - headers);
            numbers[row] = kind_of(kinds, mask, headers, taken_size, *how_many);
            if (numbers[row] == *how_many) {
                sizes[(*how_many)++] = taken_size;
                headers = taken;
            }
            at = behind;
        }
        if (end - at < ROW_TAIL) goto done;
        at += ROW_TAIL + (at[ROW_TAIL - 1] ? ROW_EXPIRY : 0);
        if (at > end) goto done;
    }
    if (at == end) result = ODQ_OK;
done:
    free(kinds);
    return result;
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

/* The number of the error, or 0; interruptions are none. */
static int synced(int (*sync)(int), int descriptor) {
    int result;
    do result = sync(descriptor); while (result && errno == EINTR);
    return result ? errno : 0;
}

static int sync_file(const char *path) {
    int descriptor;
    do descriptor = open(path, O_RDONLY | O_CLOEXEC); while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return errno;
    const int error = synced(fdatasync, descriptor);
    close(descriptor);
    return error;
}

static int sync_wal(WalSync *wal) {
    char path[4096];
    const uint64_t first = wal->next;
    for (;;) {
        const int size = snprintf(path, sizeof path, "%s/%020" PRIu64 ".sst", wal->folder, wal->next);
        const int fits = size >= 0 && size < (int)sizeof path;
        wal->error_number = fits ? sync_file(path) : ENAMETOOLONG;
        if (wal->error_number) break;
        wal->next++;
    }
    if (wal->error_number != ENOENT) return ODQ_NOT_SYNCED;
    if (wal->next == first) return ODQ_NO_WAL;
    wal->error_number = synced(fsync, wal->descriptor);
    return wal->error_number ? ODQ_NOT_SYNCED : ODQ_OK;
}

/* Writes all rows as one batch (none if there are no rows: SlateDB refuses an empty batch) and, if
 * asked, flushes, and syncs the WAL files unless `wal` is NULL; blocks until that is done. `db` stays
 * the caller's. On ODQ_FAILED, `status` holds the error and its buffer, which the caller frees; on
 * ODQ_NOT_SYNCED, `wal` has the error's number. */
EXPORT int32_t odq_write(const Symbols *s, uint64_t db, const uint8_t *rows, uint64_t size,
                         int32_t then_flush, WalSync *wal, RustCallStatus *status) {
    int result = ODQ_OK;
    if (size) result = write_rows(s, db, rows, (size_t)size, status);
    if (result == ODQ_OK && then_flush) result = flush(s, db, status);
    if (result == ODQ_OK && wal) result = sync_wal(wal);
    return result;
}

/* The number of the error, or 0. */
static int write_at(int descriptor, const uint8_t *bytes, size_t size, uint64_t offset) {
    while (size) {
        const ssize_t written = pwrite(descriptor, bytes, size, (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written ? errno : EIO;
        bytes += written;
        offset += (uint64_t)written;
        size -= (size_t)written;
    }
    return 0;
}

/* Only whoever is told ODQ_OK may say that the record counts: a successor that has not begun by then
 * will find it. */
static int append_record(const Append *to, const uint8_t *record, size_t size, int32_t *error) {
    struct stat file;
    *error = write_at(to->descriptor, record, size, to->offset);
    if (*error) return ODQ_NOT_WRITTEN;
    if (to->then_sync) *error = synced(fdatasync, to->descriptor);
    if (*error) return ODQ_NOT_SYNCED;
    if (!access(to->next, F_OK)) return ODQ_FENCED;
    if (errno != ENOENT || fstat(to->descriptor, &file)) {
        *error = errno;
        return ODQ_NOT_SYNCED;
    }
    return file.st_nlink ? ODQ_OK : ODQ_FENCED;
}

/* --- jobs --------------------------------------------------------------------------------------- */

enum { MOST_THREADS = 64 }; /* of each pool */

typedef struct Job Job;

/* Where jobs go when they are done. It lives until its owner has closed it and no job is under way.
 * The symbols are its own: the interpreter, which made them, may end before the last job. */
typedef struct { Symbols symbols; pthread_mutex_t mutex; int descriptor, closed;
                 uint64_t under_way; Job *first, *last, *scans; } Mailbox;

struct Job {
    Job *next;
    Job *next_scan; /* of those of the mailbox that are under way */
    Mailbox *mailbox;
    int is_scan, is_append, is_reader, is_iterator, then_flush, has_wal;
    /* Of a scan, with the mailbox's mutex: the future that a thread is driving, if there is one, and
     * what ends it early. */
    int given_up;
    uint64_t future;
    void (*cancel)(uint64_t future);
    uint32_t limit;
    uint64_t max_bytes; /* of the rows of a scan; 0 if there is no such limit */
    uint64_t handle, range_size, size;
    WalSync wal;
    Append to;
    Outcome outcome;
    uint8_t bytes[]; /* rows, or range and options; then the path that belongs to them */
};

/* Writes have threads of their own: they never wait behind reads that get no answer. */
typedef struct { pthread_mutex_t mutex; pthread_cond_t work; Job *first, *last; int idle, threads; }
    Pool;
static Pool write_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0};
static Pool scan_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0, 0};

static void append(Job **first, Job **last, Job *job) {
    job->next = NULL;
    if (*last) (*last)->next = job; else *first = job;
    *last = job;
}

static Job *take(Job **first, Job **last) {
    Job *job = *first;
    if (job) *first = job->next;
    if (!*first) *last = NULL;
    return job;
}

/* With the mutex of the mailbox. SlateDB asks for ever, so a scan that nobody waits for any more has
 * to be ended, or its thread would never come back. */
static void give_up(Job *scan) {
    scan->given_up = 1;
    if (scan->cancel) scan->cancel(scan->future);
}

/* With the mutex of the mailbox. */
static void forget_scan(Job *scan) {
    Job **link = &scan->mailbox->scans;
    while (*link != scan) link = &(*link)->next_scan;
    *link = scan->next_scan;
}

static void free_job(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    RustCallStatus ignored = {0};
    if (job->is_append) close(job->to.descriptor);
    else if (job->is_iterator) s->free_dbiterator(job->handle, &ignored);
    else (job->is_reader ? s->free_dbreader : s->free_db)(job->handle, &ignored);
    free(job);
}

/* Whoever counts in `under_way` may use the mailbox; the last one of a closed mailbox frees it. */
static void leave(Mailbox *mailbox) {
    pthread_mutex_lock(&mailbox->mutex);
    const int last_one = !--mailbox->under_way && mailbox->closed;
    pthread_mutex_unlock(&mailbox->mutex);
    if (!last_one) return;
    pthread_mutex_destroy(&mailbox->mutex);
    close(mailbox->descriptor);
    free(mailbox);
}

/* Nobody will ask for it: its buffers are ours to free. */
static void discard(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    RustCallStatus ignored = {0};
    if (job->outcome.rows.data) s->rustbuffer_free(job->outcome.rows, &ignored);
    if (job->outcome.status.error_buf.data)
        s->rustbuffer_free(job->outcome.status.error_buf, &ignored);
    free_job(job);
}

static void deliver(Job *job) {
    Mailbox *mailbox = job->mailbox;
    pthread_mutex_lock(&mailbox->mutex);
    if (job->is_scan) forget_scan(job);
    const int closed = mailbox->closed;
    if (!closed) {
        const int was_empty = !mailbox->first;
        append(&mailbox->first, &mailbox->last, job);
        /* One byte tells of all that is there; a pipe that is full has been told already. */
        if (was_empty) while (write(mailbox->descriptor, "!", 1) < 0 && errno == EINTR) {}
    }
    pthread_mutex_unlock(&mailbox->mutex);
    if (closed) discard(job); /* while we still count: it looks into the mailbox */
    leave(mailbox);
}

static RustBuffer copied(const Symbols *s, const uint8_t *bytes, uint64_t size,
                         RustCallStatus *status) {
    RustBuffer buffer = s->rustbuffer_alloc(size, status);
    if (status->code != CALL_SUCCESS) return buffer;
    memcpy(buffer.data, bytes, size);
    buffer.len = size;
    return buffer;
}

static void set_driven(Job *job, uint64_t future, void (*cancel)(uint64_t)) {
    pthread_mutex_lock(&job->mailbox->mutex);
    job->future = future;
    job->cancel = cancel;
    if (job->given_up && cancel) cancel(future);
    pthread_mutex_unlock(&job->mailbox->mutex);
}

/* `drive` for a job that may be given up meanwhile: then the future is ready at once, and completes
 * with CALL_CANCELLED. */
static void drive_scan(Job *job, void (*poll)(uint64_t, Continuation, uint64_t),
                       void (*cancel)(uint64_t), uint64_t future) {
    set_driven(job, future, cancel);
    drive(poll, future);
    set_driven(job, 0, NULL);
}

static int scan_result(const RustCallStatus *status) {
    if (status->code == CALL_CANCELLED) return ODQ_GIVEN_UP;
    return status->code == CALL_SUCCESS ? ODQ_OK : ODQ_FAILED;
}

/* The next `count` rows of an iterator, as the binding's `next_batch` returns them. */
static int next_batch(const Symbols *s, Job *job, uint64_t iterator, uint32_t count,
                      RustBuffer *rows, RustCallStatus *status) {
    const uint64_t own = s->clone_dbiterator(iterator, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = s->dbiterator_next_batch(own, count);
    drive_scan(job, s->poll_rust_buffer, s->cancel_rust_buffer, future);
    *rows = s->complete_rust_buffer(future, status);
    s->free_rust_buffer(future);
    return scan_result(status);
}

static uint32_t row_count(const uint8_t *rows) {
    return (uint32_t)rows[0] << 24 | (uint32_t)rows[1] << 16 | (uint32_t)rows[2] << 8 | rows[3];
}

/* The same, a few at a time, until they have `max_bytes`: SlateDB takes no such limit, and one row
 * can be as long as thousands of others. */
static int next_rows_within(const Symbols *s, Job *job, uint64_t iterator, RustBuffer *rows,
                            RustCallStatus *status) {
    uint8_t *all = NULL;
    uint64_t size = COUNT_BYTES, capacity = 0;
    uint32_t count = 0;
    int result = ODQ_OK;
    do {
        RustBuffer some = {0};
        RustCallStatus ignored = {0};
        const uint32_t left = job->limit - count;
        const uint32_t wanted = left < FEW_ROWS ? left : FEW_ROWS;
        result = next_batch(s, job, iterator, wanted, &some, status);
        if (result != ODQ_OK) break;
        const uint64_t added = some.len - COUNT_BYTES;
        if (size + added > capacity) {
            capacity = 2 * (size + added);
            uint8_t *larger = realloc(all, capacity);
            if (!larger) result = ODQ_NO_MEMORY;
            else all = larger;
        }
        const uint32_t found = row_count(some.data);
        if (result == ODQ_OK) memcpy(all + size, some.data + COUNT_BYTES, added);
        s->rustbuffer_free(some, &ignored);
        if (result != ODQ_OK) break;
        size += added;
        count += found;
        if (found < wanted) break;
    } while (count < job->limit && size < job->max_bytes);
    if (result == ODQ_OK && all) {
        const uint8_t head[COUNT_BYTES] = {(uint8_t)(count >> 24), (uint8_t)(count >> 16),
                                           (uint8_t)(count >> 8), (uint8_t)count};
        memcpy(all, head, COUNT_BYTES);
        *rows = copied(s, all, size, status);
        if (status->code != CALL_SUCCESS) result = ODQ_FAILED;
    }
    free(all);
    return result;
}

/* The next `limit` rows of an iterator, or fewer if they have more than `max_bytes`. */
static int next_rows(const Symbols *s, Job *job, uint64_t iterator, RustBuffer *rows,
                     RustCallStatus *status) {
    if (job->max_bytes) return next_rows_within(s, job, iterator, rows, status);
    return next_batch(s, job, iterator, job->limit, rows, status);
}

/* The first `limit` rows of a range, as the binding's `next_batch` returns them. Range and options
 * are serialised as uniffi does it. */
static int scan(const Symbols *s, Job *job, RustBuffer *rows, RustCallStatus *status) {
    RustCallStatus ignored = {0};
    const RustBuffer range = copied(s, job->bytes, job->range_size, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const RustBuffer options = copied(s, job->bytes + job->range_size,
                                      job->size - job->range_size, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t own = (job->is_reader ? s->clone_dbreader : s->clone_db)(job->handle, status);
    if (status->code != CALL_SUCCESS) return ODQ_FAILED;
    const uint64_t future = (job->is_reader ? s->dbreader_scan : s->db_scan)(own, range, options);
    drive_scan(job, s->poll_u64, s->cancel_u64, future);
    const uint64_t iterator = s->complete_u64(future, status);
    s->free_u64(future);
    if (status->code != CALL_SUCCESS) return scan_result(status);
    const int result = next_rows(s, job, iterator, rows, status);
    s->free_dbiterator(iterator, &ignored);
    return result;
}

static void run(Job *job) {
    const Symbols *s = &job->mailbox->symbols;
    Outcome *out = &job->outcome;
    if (job->is_iterator) {
        out->result = next_rows(s, job, job->handle, &out->rows, &out->status);
    } else if (job->is_scan) {
        out->result = scan(s, job, &out->rows, &out->status);
    } else if (job->is_append) {
        out->result = append_record(&job->to, job->bytes, job->size, &out->error_number);
    } else {
        WalSync *wal = job->has_wal ? &job->wal : NULL;
        out->result = odq_write(s, job->handle, job->bytes, job->size, job->then_flush, wal,
                                &out->status);
        out->wal_next = job->wal.next;
        out->error_number = job->wal.error_number;
    }
}

static void *work(void *of_pool) {
    Pool *pool = of_pool;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        Job *job;
        while (!(job = take(&pool->first, &pool->last))) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->idle--;
        }
        pthread_mutex_unlock(&pool->mutex);
        run(job);
        deliver(job);
        pthread_mutex_lock(&pool->mutex);
    }
    return NULL;
}

/* With the mutex of the pool. Threads are never joined: what does not answer must not keep the
 * process from ending. */
static int start_thread(Pool *pool) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Signals are for Python's threads: taken here, one would not wake whom it is meant for. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, &attributes, work, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed) pool->threads++;
    return !failed;
}

static int submit(Job *job) {
    Mailbox *mailbox = job->mailbox;
    Pool *pool = job->is_scan ? &scan_pool : &write_pool;
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->under_way++;
    if (job->is_scan) {
        job->next_scan = mailbox->scans;
        mailbox->scans = job;
    }
    pthread_mutex_unlock(&mailbox->mutex);
    pthread_mutex_lock(&pool->mutex);
    int waiting = 0;
    for (Job *one = pool->first; one; one = one->next) waiting++;
    int can_run = pool->idle > waiting || pool->threads >= MOST_THREADS || start_thread(pool);
    can_run = can_run || pool->threads; /* then it has to wait for one that is busy */
    if (can_run) {
        append(&pool->first, &pool->last, job);
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
    if (can_run) return ODQ_OK;
    pthread_mutex_lock(&mailbox->mutex);
    if (job->is_scan) forget_scan(job);
    pthread_mutex_unlock(&mailbox->mutex);
    free_job(job);
    leave(mailbox);
    return ODQ_NO_THREAD;
}

static Job *new_job(Mailbox *mailbox, uint64_t number, uint64_t handle, int is_reader,
                    uint64_t bytes, RustCallStatus *status) {
    const Symbols *s = &mailbox->symbols;
    Job *job = calloc(1, sizeof *job + bytes);
    if (!job) return NULL;
    job->mailbox = mailbox;
    job->outcome.number = number;
    job->is_reader = is_reader;
    job->handle = (is_reader ? s->clone_dbreader : s->clone_db)(handle, status);
    if (status->code == CALL_SUCCESS) return job;
    free(job);
    return NULL;
}

/* A mailbox that writes a byte to `descriptor` when there is something in it. The descriptor is the
 * mailbox's from now on. NULL if there is no memory. */
EXPORT Mailbox *odq_mailbox_new(const Symbols *s, int32_t descriptor) {
    Mailbox *mailbox = calloc(1, sizeof *mailbox);
    if (!mailbox) return NULL;
    mailbox->symbols = *s;
    mailbox->descriptor = descriptor;
    pthread_mutex_init(&mailbox->mutex, NULL);
    return mailbox;
}

/* Nothing may be asked of the mailbox after this. Writes that are under way go on to their end. */
EXPORT void odq_mailbox_close(Mailbox *mailbox) {
    Job *job;
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->closed = 1;
    mailbox->under_way++; /* us, until its jobs are discarded */
    for (Job *scan = mailbox->scans; scan; scan = scan->next_scan) give_up(scan);
    Job *first = mailbox->first;
    mailbox->first = mailbox->last = NULL;
    pthread_mutex_unlock(&mailbox->mutex);
    while ((job = first)) { first = job->next; discard(job); }
    leave(mailbox);
}

/* Moves up to `capacity` outcomes into `out`; returns how many. */
EXPORT uint32_t odq_mailbox_take(Mailbox *mailbox, Outcome *out, uint32_t capacity) {
    uint32_t count = 0;
    Job *jobs = NULL, *last = NULL, *job;
    pthread_mutex_lock(&mailbox->mutex);
    while (count < capacity && (job = take(&mailbox->first, &mailbox->last))) {
        append(&jobs, &last, job);
        out[count++] = job->outcome;
    }
    pthread_mutex_unlock(&mailbox->mutex);
    while ((job = jobs)) { jobs = job->next; free_job(job); }
    return count;
}

/* `odq_write` as a job; rows and folder are copied. ODQ_FAILED: `status` says why there is no job. */
EXPORT int32_t odq_submit_write(Mailbox *mailbox, uint64_t number, uint64_t db, const uint8_t *rows,
                                uint64_t size, int32_t then_flush, const WalSync *wal,
                                RustCallStatus *status) {
    const size_t folder_size = wal ? strlen(wal->folder) + 1 : 0;
    Job *job = new_job(mailbox, number, db, 0, size + folder_size, status);
    if (!job) return status->code == CALL_SUCCESS ? ODQ_NO_MEMORY : ODQ_FAILED;
    job->size = size;
    job->then_flush = then_flush;
    if (size) memcpy(job->bytes, rows, size);
    if (wal) {
        job->has_wal = 1;
        job->wal = *wal;
        job->wal.folder = memcpy(job->bytes + size, wal->folder, folder_size);
    }
    return submit(job);
}

/* A record to a journal as a job: `head`, then `rows`. All is copied, the descriptor too: should it be
 * closed before the job is done, its number may soon be that of another file. ODQ_NOT_WRITTEN: there
 * is no job, and `error_number` says why. */
EXPORT int32_t odq_submit_append(Mailbox *mailbox, uint64_t number, const Append *to,
                                 const uint8_t *head, uint64_t head_size, const uint8_t *rows,
                                 uint64_t size, int32_t *error_number) {
    const size_t next_size = strlen(to->next) + 1;
    Job *job = calloc(1, sizeof *job + head_size + size + next_size);
    if (!job) return ODQ_NO_MEMORY;
    job->mailbox = mailbox;
    job->outcome.number = number;
    job->is_append = 1;
    job->size = head_size + size;
    memcpy(job->bytes, head, head_size);
    memcpy(job->bytes + head_size, rows, size);
    job->to = *to;
    job->to.next = memcpy(job->bytes + job->size, to->next, next_size);
    job->to.descriptor = fcntl(to->descriptor, F_DUPFD_CLOEXEC, 0);
    if (job->to.descriptor >= 0) return submit(job);
    *error_number = errno;
    free(job);
    return ODQ_NOT_WRITTEN;
}

/* The first `limit` rows of a range of a database, or of a reader's, as a job; fewer if they have
 * `max_bytes` before, which 0 does not bound. `bytes` has the range and then the options, as uniffi
 * serialises them. */
EXPORT int32_t odq_submit_scan(Mailbox *mailbox, uint64_t number, uint64_t handle, int32_t is_reader,
                               const uint8_t *bytes, uint64_t range_size, uint64_t size,
                               uint32_t limit, uint64_t max_bytes, RustCallStatus *status) {
    Job *job = new_job(mailbox, number, handle, is_reader, size, status);
    if (!job) return status->code == CALL_SUCCESS ? ODQ_NO_MEMORY : ODQ_FAILED;
    job->is_scan = 1;
    job->range_size = range_size;
    job->size = size;
    job->limit = limit;
    job->max_bytes = max_bytes;
    memcpy(job->bytes, bytes, size);
    return submit(job);
}

/* The next `limit` rows of an iterator as a job. It is a scan as all others are. */
EXPORT int32_t odq_submit_next(Mailbox *mailbox, uint64_t number, uint64_t iterator, uint32_t limit,
                               RustCallStatus *status) {
    Job *job = calloc(1, sizeof *job);
    if (!job) return ODQ_NO_MEMORY;
    job->mailbox = mailbox;
    job->outcome.number = number;
    job->is_scan = job->is_iterator = 1;
    job->limit = limit;
    job->handle = mailbox->symbols.clone_dbiterator(iterator, status);
    if (status->code == CALL_SUCCESS) return submit(job);
    free(job);
    return ODQ_FAILED;
}

/* Nobody waits for the scan of that number any more. Its outcome is ODQ_GIVEN_UP, unless it was done
 * before. */
EXPORT void odq_give_up_scan(Mailbox *mailbox, uint64_t number) {
    pthread_mutex_lock(&mailbox->mutex);
    for (Job *scan = mailbox->scans; scan; scan = scan->next_scan)
        if (scan->outcome.number == number) give_up(scan);
    pthread_mutex_unlock(&mailbox->mutex);
}
