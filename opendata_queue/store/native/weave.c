/* Joins columns to rows. */
#include "helper.h"

#include <string.h>

enum { SIZE_BYTES = 4 };

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
 * rows/weave.py says what `widths` mean. ODQ_MALFORMED: the columns have other rows than that. */
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
