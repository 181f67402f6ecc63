/* The work that is done under the directory's lock, in C, because NumPy needs a dozen passes for it.
 *
 * This kernel is optional: if it was not built, NumPy does the same work. Each function has a
 * counterpart in PriorityTree (tree.py) or NumpyKernel (node/kernel.py). Always change both. The
 * functions are called through ctypes.PyDLL, which keeps the GIL, because a thread that holds the
 * directory's lock could otherwise lose 5 ms to another Python thread.
 *
 * A tree is an array of levels, leaves first. Every node is the sum of 32 nodes of the level below.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FANOUT = 32, SHIFT = 5, TOP = 1024 };

/* Keeps stores in order: a process that sees a store after this point also sees all stores before it,
 * even if this process is killed. Only the compiler must be told, because x86-64 keeps the order. */
#define IN_ORDER __atomic_thread_fence(__ATOMIC_RELEASE)

/* tables.Word, and the columns and states of the claim table */
enum { DIRTY = 0, CURSOR = 1, LENGTH = 3, WRITE_COUNT = 4, ALPHA = 7, EPS = 8, MAX_SLOT = 10,
       CLAIM_ROWS = 13, NEXT_WRITE_COUNT = 15, AVAILABLE = 47 };
enum { COUNT, FIRST, MEMBER, STATE, COLUMNS };
enum { WRITING = 1, PUBLISHING = 2 };

/* sums[l] and minima[l] are the nodes of level l; minima[0] is not used. scratch has [blocks] numbers.
 * top is the number of nodes of the highest level, at most 1024. */
typedef struct {
    double **sums, **minima;
    uint8_t *marks;
    int64_t *scratch;
    int64_t levels, blocks, top, capacity;
} Tree;

typedef struct {
    volatile int64_t *words, *claims;
    int64_t *versions;
    double *leaves;
    uint8_t *marks;
    int64_t capacity;
} Tables;

/* Recompute the ancestors of the marked blocks of leaves, then clear the marks. */
void replay_refresh(const Tree *tree) {
    double **sums = tree->sums, **minima = tree->minima;
    uint8_t *marks = tree->marks;
    int64_t levels = tree->levels, blocks = tree->blocks, *scratch = tree->scratch, count = 0;
    const uint64_t *words = (const uint64_t *)marks;
    for (int64_t word = 0; word < (blocks + 7) / 8; word++) {
        if (!words[word]) continue;
        int64_t stop = word * 8 + 8 < blocks ? word * 8 + 8 : blocks;
        for (int64_t block = word * 8; block < stop; block++)
            if (marks[block]) scratch[count++] = block;
    }
    int64_t marked = count;
    for (int64_t level = 1; level < levels; level++) {
        const double *below = sums[level - 1];
        const double *least = level == 1 ? below : minima[level - 1];
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            /* scratch has the marked blocks, and on higher levels their parents, each once */
            int64_t node = scratch[i];
            const double *child = below + node * FANOUT, *low = least + node * FANOUT;
            double sum = 0.0, minimum = INFINITY;
            for (int k = 0; k < FANOUT; k++) {
                sum += child[k];
                if (low[k] > 0.0 && low[k] < minimum) minimum = low[k];
            }
            sums[level][node] = sum;
            minima[level][node] = minimum;
        }
        if (level + 1 == levels) break;
        for (int64_t i = 0; i < count; i++) {
            int64_t parent = scratch[i] >> SHIFT;
            if (!kept || scratch[kept - 1] != parent) scratch[kept++] = parent;
        }
        count = kept;
    }
    if (marked)
        for (int64_t word = 0; word < (blocks + 7) / 8; word++)
            if (words[word]) ((uint64_t *)marks)[word] = 0;
}

static void prefetch_block(const double *block) {
#if defined(__GNUC__)
    for (int line = 0; line < FANOUT; line += 8) __builtin_prefetch(block + line);
#else
    (void)block;
#endif
}

/* Draw the slots at the quantiles uniforms[0 .. n-1]. out: n slots (int64), then n leaves. Returns the
 * number of drawn leaves that are 0, which must be drawn again, or -1 if all leaves of the tree are 0. */
int64_t replay_draw(const Tree *tree, const double *uniforms, int64_t n, void *out) {
    double **sums = tree->sums, *leaves = (double *)out + n;
    int64_t *slots = out, levels = tree->levels, top = tree->top, zeros = 0;
    double cumulative[TOP], running = 0.0;
    const double *highest = sums[levels - 1];
    for (int64_t i = 0; i < top; i++) cumulative[i] = running += highest[i];
    if (!(running > 0.0)) return -1;
    /* Go down level by level with all draws together, so that the cache misses of a level overlap.
     * slots[i] is the node that draw i has reached, and leaves[i] the mass that is left below it. */
    for (int64_t i = 0; i < n; i++) {
        double mass = uniforms[i] * running;
        int64_t low = 0, high = top - 1; /* the first node with cumulative > mass */
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (cumulative[middle] > mass) high = middle;
            else low = middle + 1;
        }
        slots[i] = low;
        leaves[i] = mass - (cumulative[low] - highest[low]);
        prefetch_block(sums[levels - 2] + low * FANOUT);
    }
    for (int64_t level = levels - 2; level >= 0; level--) {
        for (int64_t i = 0; i < n; i++) {
            const double *child = sums[level] + slots[i] * FANOUT;
            double mass = leaves[i], sum = child[0];
            int k = 0;
            while (k < FANOUT - 1 && sum <= mass) sum += child[++k];
            slots[i] = slots[i] * FANOUT + k;
            leaves[i] = mass - (sum - child[k]);
            if (level > 0) prefetch_block(sums[level - 1] + slots[i] * FANOUT);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] >= tree->capacity) slots[i] = tree->capacity - 1;
        leaves[i] = sums[0][slots[i]];
        zeros += leaves[i] == 0.0;
    }
    return zeros;
}

/* Refresh and draw. summary gets the tree's minimum and total. Returns what replay_draw returns. */
int64_t replay_sample(const Tree *tree, const double *uniforms, int64_t n, void *out,
                            double *summary) {
    replay_refresh(tree);
    double minimum = INFINITY, total = 0.0;
    for (int64_t i = 0; i < tree->top; i++) {
        double low = tree->minima[tree->levels - 1][i];
        if (low > 0.0 && low < minimum) minimum = low;
        total += tree->sums[tree->levels - 1][i];
    }
    summary[0] = minimum;
    summary[1] = total;
    return replay_draw(tree, uniforms, n, out);
}

static double number(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Set new priorities of rows. A slot is skipped as stale if it does not hold the generation that the
 * priority was computed for. With generations == NULL, it is stale if it holds no published row. Slots
 * below 0 are skipped, too. Everything is checked before DIRTY is set and the first leaf is stored. The
 * caller clears DIRTY.
 * leaves: scratch [n]. result: number of stale slots, position of the largest stored priority (-1 if
 * none was stored), whether MAX_SLOT is among the stored slots.
 * Returns 0, or what is wrong with the item at result[1]: 1 priority, 2 slot, 3 leaf too large. */
int replay_update(const Tables *tables, const int64_t *slots, const double *raw,
                        const int64_t *generations, int64_t n, double largest, double *leaves,
                        int64_t *result) {
    volatile int64_t *words = tables->words;
    double alpha = number(words[ALPHA]), eps = number(words[EPS]);
    int64_t stale = 0, best = -1, moved = 0, where = words[MAX_SLOT];
    for (int64_t i = 0; i < n; i++) {
        result[1] = i;
        if (!(raw[i] >= 0.0 && raw[i] <= largest)) return 1;
        if (slots[i] >= tables->capacity) return 2;
        leaves[i] = -1.0;
        if (slots[i] < 0) continue;
        int64_t version = tables->versions[slots[i]];
        int fresh = version > 0 && !(version & 1);
        if (generations) fresh = fresh && version >> 1 == generations[i];
        if (!fresh) {
            stale++;
            continue;
        }
        leaves[i] = alpha == 1.0 ? raw[i] + eps : pow(raw[i] + eps, alpha);
        if (!(leaves[i] <= largest)) return 3;
        if (leaves[i] < DBL_MIN) leaves[i] = DBL_MIN; /* a row with a leaf of 0 is never drawn */
        if (best < 0 || raw[i] > raw[best]) best = i;
        moved |= slots[i] == where;
    }
    if (best >= 0) {
        words[DIRTY] = 1;
        IN_ORDER;
        for (int64_t i = 0; i < n; i++) {
            if (leaves[i] < 0.0) continue;
            tables->marks[slots[i] >> SHIFT] = 1;
            tables->leaves[slots[i]] = leaves[i];
        }
    }
    result[0] = stale;
    result[1] = best;
    result[2] = moved;
    return 0;
}

/* Set words[word] = value, and then write a claim into row `row` of the table of claims. It claims
 * `count` slots, beginning with the slot of ticket `first`.
 * Returns 0, or 1 (and changes nothing) if another claim has one of these slots. */
int replay_reserve(const Tables *tables, int64_t row, int64_t first, int64_t count,
                         int64_t member, int64_t word, int64_t value) {
    volatile int64_t *words = tables->words, *claims = tables->claims;
    int64_t capacity = tables->capacity, start = first % capacity, used = words[CLAIM_ROWS];
    for (int64_t other = 0; other < used; other++) {
        int64_t rows = claims[other * COLUMNS + COUNT];
        if (!rows) continue;
        int64_t ahead = claims[other * COLUMNS + FIRST] % capacity - start;
        if (ahead < 0) ahead += capacity;
        if (ahead < count || capacity - ahead < rows) return 1;
    }
    volatile int64_t *claim = claims + row * COLUMNS;
    words[DIRTY] = 1;
    IN_ORDER;
    words[word] = value;
    claim[FIRST] = first;
    claim[MEMBER] = member;
    claim[STATE] = WRITING;
    IN_ORDER;
    claim[COUNT] = count; /* the claim holds from here on */
    IN_ORDER;
    int64_t published = 0, available = 0;
    for (int64_t i = 0, slot = start; i < count; i++, slot = slot + 1 == capacity ? 0 : slot + 1) {
        published += tables->versions[slot] > 0 && !(tables->versions[slot] & 1);
        available += tables->leaves[slot] != 0.0;
        tables->versions[slot] |= 1;
        tables->marks[slot >> SHIFT] = 1;
        tables->leaves[slot] = 0.0;
        if (words[MAX_SLOT] == slot) words[MAX_SLOT] = -1;
    }
    words[LENGTH] -= published;
    words[AVAILABLE] -= available;
    IN_ORDER;
    words[DIRTY] = 0;
    return 0;
}

/* Publish written rows. leaf is the leaf of each row; 0 means that the leaves are already stored.
 * Returns 0, or 1 (and changes nothing) if the claim is not the member's, or not in the state of
 * writing. */
int replay_publish(const Tables *tables, int64_t row, int64_t first, int64_t count,
                         int64_t member, double leaf, int64_t *generations) {
    volatile int64_t *words = tables->words, *claim = tables->claims + row * COLUMNS;
    int64_t capacity = tables->capacity, slot = first % capacity;
    if (claim[COUNT] != count || claim[FIRST] != first || claim[MEMBER] != member ||
        claim[STATE] != WRITING)
        return 1;
    words[DIRTY] = 1;
    IN_ORDER;
    words[NEXT_WRITE_COUNT] = words[WRITE_COUNT] + count;
    IN_ORDER;
    claim[STATE] = PUBLISHING; /* from here on, repair publishes the rows */
    IN_ORDER;
    for (int64_t i = 0; i < count; i++, slot = slot + 1 == capacity ? 0 : slot + 1) {
        tables->versions[slot] += 1;
        generations[i] = tables->versions[slot] >> 1;
        if (leaf > 0.0) {
            tables->marks[slot >> SHIFT] = 1;
            tables->leaves[slot] = leaf;
        }
    }
    words[LENGTH] += count;
    words[AVAILABLE] += count;
    words[WRITE_COUNT] = words[NEXT_WRITE_COUNT];
    IN_ORDER;
    claim[COUNT] = 0;
    IN_ORDER;
    words[DIRTY] = 0;
    return 0;
}

/* Write rows at the cursor in one call: reserve, copy and publish. sources and targets: the address of
 * the first row of each column. sizes: bytes per row of each column. leaf > 0: the leaf of each row.
 * Returns the first ticket, or -1 (and changes nothing) if the table of claims has no unused row below
 * CLAIM_ROWS, or another claim has one of the slots. */
int64_t replay_append(const Tables *tables, int64_t count, int64_t member, double leaf,
                      int64_t columns, const char *const *sources, char *const *targets,
                      const int64_t *sizes, int64_t *generations) {
    int64_t capacity = tables->capacity, used = tables->words[CLAIM_ROWS], row = 0;
    int64_t first = tables->words[CURSOR], start = first % capacity;
    int64_t before_end = count < capacity - start ? count : capacity - start;
    while (row < used && tables->claims[row * COLUMNS + COUNT]) row++;
    if (row == used || replay_reserve(tables, row, first, count, member, CURSOR, first + count))
        return -1;
    IN_ORDER;
    for (int64_t column = 0; column < columns; column++) {
        int64_t size = sizes[column];
        char *target = targets[column];
        memcpy(target + start * size, sources[column], (size_t)(before_end * size));
        memcpy(target, sources[column] + before_end * size, (size_t)((count - before_end) * size));
    }
    IN_ORDER;
    replay_publish(tables, row, first, count, member, leaf, generations);
    return first;
}

/* Frames that are stored once, see node/frames.py. Both functions for them are called without the GIL. */

static uint64_t load(const uint8_t *bytes, int64_t count) {
    uint64_t word = 0;
    memcpy(&word, bytes, (size_t)count);
    return word;
}

/* If two frames have equal hashes, their bytes are compared, too. The hash has four lanes, because each
 * multiplication waits for the one before it in its lane. */
static int64_t hash_of(const uint8_t *frame, int64_t bytes) {
    const uint64_t prime = 0x9E3779B97F4A7C15u;
    uint64_t lanes[4] = {prime, prime ^ 1, prime ^ 2, prime ^ 3};
    int64_t at = 0;
    for (; at + 32 <= bytes; at += 32)
        for (int lane = 0; lane < 4; lane++) {
            lanes[lane] = (lanes[lane] ^ load(frame + at + 8 * lane, 8)) * prime;
            lanes[lane] ^= lanes[lane] >> 29;
        }
    for (; at < bytes; at += 8) {
        lanes[0] = (lanes[0] ^ load(frame + at, bytes - at < 8 ? bytes - at : 8)) * prime;
        lanes[0] ^= lanes[0] >> 29;
    }
    uint64_t hash = (uint64_t)bytes;
    for (int lane = 0; lane < 4; lane++) {
        hash = (hash ^ lanes[lane]) * prime;
        hash ^= hash >> 32;
    }
    return (int64_t)hash;
}

/* Find frames that are in the ring or occurred earlier in this call. Returns the number of new frames.
 * columns: per column the address, the number of frames, and the frames per value.
 * table: pairs of a hash and a ticket + 1, see replay_keep_frames. entries: a power of two.
 * oldest: tickets below it do not count.
 * batch: pairs of a hash and k + 1 for the k-th new frame, zeros at first. batch_entries: a power of two.
 * fresh: result, per new frame its address, hash and place in refs.
 * hints: [frames per value], zeros at first.
 * refs: result, per frame the ticket of an equal frame in the ring, or -1 - k for the k-th new frame.
 *
 * Stacks of neighbouring rows overlap. So the function first tries the distance at which it found the
 * previous frame with the same place in its stack, because a comparison costs a third of hashing and a
 * look-up. */
int64_t replay_find_frames(const int64_t *columns, int64_t column_count, int64_t bytes,
                           const uint8_t *ring, int64_t size, const volatile int64_t *table,
                           int64_t entries, int64_t oldest, int64_t *batch, int64_t batch_entries,
                           int64_t *fresh, int64_t *hints, int64_t *refs) {
    int64_t count = 0, place = 0;
    for (int64_t column = 0; column < column_count; column++) {
        const uint8_t *frames = (const uint8_t *)(intptr_t)columns[3 * column];
        int64_t n = columns[3 * column + 1], stack = columns[3 * column + 2];
        for (int64_t i = 0; i < n; i++, place++) {
            const uint8_t *frame = frames + i * bytes;
            int64_t guess = place - hints[i % stack], from = place - i, other = column;
            if (guess < place && guess >= 0) {
                while (guess < from) from -= columns[3 * --other + 1];
                const uint8_t *first = (const uint8_t *)(intptr_t)columns[3 * other];
                if (!memcmp(first + (guess - from) * bytes, frame, (size_t)bytes)) {
                    refs[place] = refs[guess];
                    continue;
                }
            }
            int64_t hash = hash_of(frame, bytes), at = hash & (batch_entries - 1), k;
            refs[place] = INT64_MIN;
            for (; (k = batch[2 * at + 1]); at = (at + 1) & (batch_entries - 1))
                if (batch[2 * at] == hash &&
                    !memcmp((const uint8_t *)(intptr_t)fresh[3 * k - 3], frame, (size_t)bytes)) {
                    refs[place] = -k;
                    hints[i % stack] = place - fresh[3 * k - 1];
                    break;
                }
            int64_t bucket = hash & (entries - 2);
            for (int64_t entry = bucket; entry < bucket + 2 && refs[place] == INT64_MIN; entry++) {
                int64_t ticket = table[2 * entry + 1] - 1;
                if (table[2 * entry] == hash && ticket >= oldest &&
                    !memcmp(ring + ticket % size * bytes, frame, (size_t)bytes))
                    refs[place] = ticket;
            }
            if (refs[place] != INT64_MIN) continue;
            fresh[3 * count] = (int64_t)(intptr_t)frame;
            fresh[3 * count + 1] = hash;
            fresh[3 * count + 2] = place;
            batch[2 * at] = hash;
            batch[2 * at + 1] = ++count;
            refs[place] = -count;
        }
    }
    return count;
}

/* Copy new frames into the ring, from the ticket first on. Enter each into the table, in place of the
 * older entry of its bucket of two. Simultaneous calls may lose entries; such a frame is later stored
 * again. */
void replay_keep_frames(const int64_t *fresh, int64_t count, int64_t bytes, uint8_t *ring,
                        int64_t size, int64_t first, volatile int64_t *table, int64_t entries) {
    for (int64_t i = 0; i < count; i++) {
        int64_t ticket = first + i, hash = fresh[3 * i + 1], entry = hash & (entries - 2);
        memcpy(ring + ticket % size * bytes, (const uint8_t *)(intptr_t)fresh[3 * i], (size_t)bytes);
        if (table[2 * entry + 3] < table[2 * entry + 1]) entry++;
        table[2 * entry] = hash;
        table[2 * entry + 1] = ticket + 1;
    }
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&module); }
