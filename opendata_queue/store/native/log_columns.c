/* Takes the rows of a metadata log apart into columns. */
#include "helper.h"

#include <stdlib.h>
#include <string.h>

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
 * `names` is NULL. ODQ_MALFORMED: something is wrong; the caller finds out what. */
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
