/* Copies, transfers and sums in one call, without the interpreter's lock. If this is not built, Python does the same.

   put             moves into whole chunks of slots, and each chunk's digest, of the bytes as they were copied (R14);
                   also which moves have numbers that are not finite (R39)
   get             moves out of a chunk, and its digest, taken of the slot after the copy (R7, R26)
   move            moves alone
   receive_chunks  bytes of chunks from a socket, and each chunk's digest, taken as they come (R14, R26)
   send            bytes to a socket, from where they lie
   add             bytes times a factor to others, as elements of GF(2^8) (R37)

   Tables come as bytes, in rows of three unsigned 64-bit numbers: the stable ABI of Python 3.10 has no buffers. A chunk
   is (address, nbytes, how many of the moves are its own), a move is (target, source, nbytes), a place to receive into
   is (target, whether the next place is of the same chunk, nbytes). Tables of copies are checked before anything is
   copied. Stores *around the cache* do not read first what they overwrite, and leave the cache to others. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* If the build's flags chose the instructions, a wheel would fail on older processors: so they are chosen here, and
   where the processor lacks them the import is refused and Python's loops go on. Other compilers take what all have. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NEEDS_AVX2 1
static int is_supported(void) { return __builtin_cpu_supports("avx2"); }
#pragma GCC push_options
#pragma GCC target("avx2")
#else
#define NEEDS_AVX2 0
static int is_supported(void) { return 1; }
#endif

#if NEEDS_AVX2
#include <immintrin.h>
#endif
#if defined(__x86_64__)
#include <emmintrin.h>
#define HAS_AROUND 1
#else
#define HAS_AROUND 0
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"

#define VERSION 1 /* of what Python calls here and of its tables: extension.py names the same */
#define PIECE_BYTES (16u << 10) /* copied, then digested; two of them fit a core's first cache */
#define PREFETCH_BYTES (1u << 10) /* digested, then as much of what is copied next is prefetched */
#define BUFFER_BYTES (4u << 10) /* if it were larger, no bytes would be on their way while it is digested and stored */
#define AHEAD_BYTES (6u << 10)  /* behind a piece that is stored: so far ahead the source is asked for */
#define NEAR_BYTES (2u << 10)   /* the same where the source itself is read in front of every store */
#define MOVE_BYTES (448u << 10) /* if plain copies were longer, the C library would choose stores around the cache */
#define AROUND_BYTES_MIN 4096u  /* below it their head and tail cost more than the cache */
#define ARRIVED_BYTES (256u << 10) /* most of one recv(2); digested once half as much is there: in the second cache */
#define VIEWS_MAX 64u
#define WAIT_S_MAX 3600.0 /* of one poll(2), whose milliseconds are an int */
#define DIGEST_BYTES 16u
#define LINE_BYTES 64u
#define VECTOR_BYTES 32u

typedef struct {
    uint64_t address, nbytes, count;
} Chunk;

typedef struct {
    uint64_t target, source, nbytes;
} Move;

typedef struct {
    uint64_t target, goes_on, nbytes;
} Place;

static char *at(uint64_t address) { return (char *)(uintptr_t)address; }

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* -- numbers that are not finite ---------------------------------------------------------------------------------- */

/* Kinds of numbers, in the order of `core/format/dtypes.py`. Flipped and masked, the highest 16 bits of a number, or all 8,
   are at least `limit` if it is infinity or a NaN: the exponent has all its bits. Float8_*fnuz have one NaN, minus zero.
   Bits of a mask repeat every 8 bytes. */
static const struct {
    uint64_t mask;
    unsigned char flip, limit_8;
    int16_t limit_16; /* 0: numbers of 8 bits */
} KINDS[] = {
    {0, 0, 0, 0},
    {0x7ff0000000000000u, 0, 0, 0x7ff0},    /* float64 */
    {0x7f8000007f800000u, 0, 0, 0x7f80},    /* float32 */
    {0x7c007c007c007c00u, 0, 0, 0x7c00},    /* float16 */
    {0x7f807f807f807f80u, 0, 0, 0x7f80},    /* bfloat16 */
    {0x7c7c7c7c7c7c7c7cu, 0, 0x7c, 0},      /* float8_e5m2 */
    {0x7f7f7f7f7f7f7f7fu, 0, 0x7f, 0},      /* float8_e4m3fn */
    {0xffffffffffffffffu, 0x7f, 0xff, 0},   /* float8_e4m3fnuz, float8_e5m2fnuz */
};
#define KINDS_COUNT (sizeof KINDS / sizeof *KINDS)

/* The largest of each 16 bits, signed, or of each byte, of what was looked at, flipped and masked. */
typedef struct {
    unsigned char bytes[VECTOR_BYTES];
} Largest;

/* Look at vectors, two at once. */
static void look_at(unsigned char kind, const char *bytes, size_t nbytes, Largest *largest)
{
    int is_wide = KINDS[kind].limit_16 != 0;
    char flip = (char)KINDS[kind].flip;
#if NEEDS_AVX2
    __m256i mask = _mm256_set1_epi64x((long long)KINDS[kind].mask), flips = _mm256_set1_epi8(flip);
    __m256i one = _mm256_loadu_si256((const __m256i *)largest->bytes), other = one;
    const __m256i *at = (const __m256i *)bytes, *end = (const __m256i *)(bytes + nbytes);
    if (is_wide) {
        for (; at < end; at += 2) {
            one = _mm256_max_epi16(one, _mm256_and_si256(_mm256_loadu_si256(at), mask));
            other = _mm256_max_epi16(other, _mm256_and_si256(_mm256_loadu_si256(at + 1), mask));
        }
        one = _mm256_max_epi16(one, other);
    } else {
        for (; at < end; at += 2) {
            one = _mm256_max_epu8(one, _mm256_and_si256(_mm256_xor_si256(_mm256_loadu_si256(at), flips), mask));
            other = _mm256_max_epu8(other, _mm256_and_si256(_mm256_xor_si256(_mm256_loadu_si256(at + 1), flips), mask));
        }
        one = _mm256_max_epu8(one, other);
    }
    _mm256_storeu_si256((__m256i *)largest->bytes, one);
#else
    unsigned char mask[8];
    memcpy(mask, &KINDS[kind].mask, sizeof mask);
    for (size_t i = 0; i < nbytes; i += 2) {
        unsigned char here[2] = {(unsigned char)((bytes[i] ^ flip) & mask[i % 8]),
                                 (unsigned char)((bytes[i + 1] ^ flip) & mask[i % 8 + 1])};
        unsigned char *known = largest->bytes + i % VECTOR_BYTES;
        int16_t at, most;
        memcpy(&at, here, sizeof at), memcpy(&most, known, sizeof most);
        if (is_wide && at > most)
            memcpy(known, here, sizeof here);
        for (size_t k = 0; k < 2 && !is_wide; k++)
            known[k] = here[k] > known[k] ? here[k] : known[k];
    }
#endif
}

/* Look at whole numbers that were just copied, and lie in the cache. */
static void look(unsigned char kind, const char *bytes, size_t nbytes, Largest *largest)
{
    char rest[2 * VECTOR_BYTES] = {0};
    size_t left = kind ? nbytes % sizeof rest : 0;
    if (kind)
        look_at(kind, bytes, nbytes - left, largest);
    if (left) {
        memcpy(rest, bytes + nbytes - left, left);
        look_at(kind, rest, sizeof rest, largest);
    }
}

/* Return whether some number that was looked at is not finite. */
static unsigned char is_bad(unsigned char kind, const Largest *largest)
{
    unsigned char bad = 0;
    for (size_t i = 0; kind && i < VECTOR_BYTES; i += 2) {
        int16_t at;
        memcpy(&at, largest->bytes + i, sizeof at);
        bad |= KINDS[kind].limit_16 ? at >= KINDS[kind].limit_16
                                    : largest->bytes[i] >= KINDS[kind].limit_8 ||
                                          largest->bytes[i + 1] >= KINDS[kind].limit_8;
    }
    return bad;
}

/* -- copies ------------------------------------------------------------------------------------------------------- */

/* Copy around the cache, and ask meanwhile for as many bytes at `ahead`, which are read next. Asking is harmless where
   there is no memory. What was read stays in the cache. */
static void copy_around(char *target, const char *source, size_t nbytes, const char *ahead)
{
#if HAS_AROUND
    size_t head = least((0 - (uintptr_t)target) & 15, nbytes); /* if the target is not aligned, the store faults */
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= LINE_BYTES; nbytes -= LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32)), d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_prefetch(ahead, _MM_HINT_T0);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
        target += LINE_BYTES, source += LINE_BYTES, ahead += LINE_BYTES;
    }
#endif
    memcpy(target, source, nbytes);
}

/* Put stores around the cache in front of whatever is stored next: another process reads the slots then. */
static void end_around(void)
{
#if HAS_AROUND
    _mm_sfence();
#endif
}

static int goes_around(size_t nbytes, int around) { return HAS_AROUND && around && nbytes >= AROUND_BYTES_MIN; }

static void make_moves(const Move *moves, size_t count, int around)
{
    for (size_t i = 0; i < count; i++) {
        char *target = at(moves[i].target), *source = at(moves[i].source);
        size_t left = moves[i].nbytes;
        if (goes_around(left, around)) {
            copy_around(target, source, left, source + NEAR_BYTES);
            continue;
        }
        while (left) {
            size_t size = least(left, MOVE_BYTES);
            memcpy(target, source, size);
            target += size, source += size, left -= size;
        }
    }
    end_around();
}

/* Digest bytes. Meanwhile prefetch as many of the move's next bytes, a piece at most, at `source` and at `target`, if
   that many are left: else memory would be idle. */
static void digest_and_prefetch(
    XXH3_state_t *state, const char *bytes, size_t nbytes, const char *source, const char *target, size_t left)
{
    size_t ahead = left < nbytes ? 0 : least(nbytes - nbytes % PREFETCH_BYTES, PIECE_BYTES);
    for (size_t done = 0; done < ahead; done += PREFETCH_BYTES) {
        XXH3_128bits_update(state, bytes + done, PREFETCH_BYTES);
        for (size_t line = done; line < done + PREFETCH_BYTES; line += LINE_BYTES) {
            __builtin_prefetch(source + line);
            __builtin_prefetch(target + line, 1);
        }
    }
    XXH3_128bits_update(state, bytes + ahead, nbytes - ahead);
}

static void end_digest(const XXH3_state_t *state, unsigned char *digest)
{
    XXH128_canonicalFromHash((XXH128_canonical_t *)digest, XXH3_128bits_digest(state));
}

/* Fill a chunk by moves in the order of their targets; what none of them fills is zeroed and digested with the rest.
   Around the cache each piece is digested in a buffer and stored from there: if the source changes meanwhile, the digest
   is still that of what was stored. Otherwise it is taken of the slot, right after the copy. Of every move the kind of
   its numbers, if kinds are given, becomes whether one of them is not finite. */
static void put_chunk(const Chunk *chunk, const Move *moves, int around, unsigned char *digest, unsigned char *kinds)
{
    char buffer[BUFFER_BYTES];
    char *filled = at(chunk->address), *digested = filled, *end = filled + chunk->nbytes;
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    for (size_t i = 0; i < chunk->count; i++) {
        char *target = at(moves[i].target), *source = at(moves[i].source);
        size_t left = moves[i].nbytes;
        unsigned char kind = kinds ? kinds[i] : 0;
        Largest largest = {{0}};
        memset(filled, 0, (size_t)(target - filled));
        if (goes_around(left, around)) {
            XXH3_128bits_update(&state, digested, (size_t)(target - digested));
            while (left) {
                size_t size = least(left, BUFFER_BYTES);
                memcpy(buffer, source, size);
                XXH3_128bits_update(&state, buffer, size);
                look(kind, buffer, size, &largest);
                copy_around(target, buffer, size, source + AHEAD_BYTES);
                target += size, source += size, left -= size;
            }
            digested = target;
        }
        while (left) {
            size_t size = least(left, PIECE_BYTES);
            memcpy(target, source, size);
            look(kind, target, size, &largest);
            target += size, source += size, left -= size;
            if ((size_t)(target - digested) < PIECE_BYTES)
                continue;
            digest_and_prefetch(&state, digested, (size_t)(target - digested), source, target, left);
            digested = target;
        }
        if (kinds)
            kinds[i] = is_bad(kind, &largest);
        filled = target;
    }
    memset(filled, 0, (size_t)(end - filled));
    XXH3_128bits_update(&state, digested, (size_t)(end - digested));
    end_digest(&state, digest);
}

/* Copy parts of a chunk and digest it behind the copy: if its slot is lost meanwhile, the digest is another one. A move
   from in front of what is digested already is not proved by that: then the whole chunk is digested after all moves. */
static void get_chunk(const Chunk *chunk, const Move *moves, int around, unsigned char *digest, unsigned char *kinds)
{
    (void)kinds; /* what is copied out was looked at when it was put */
    const char *start = at(chunk->address), *digested = start, *end = start + chunk->nbytes;
    int is_proved = 1;
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    for (size_t i = 0; i < chunk->count; i++) {
        char *target = at(moves[i].target);
        const char *source = at(moves[i].source);
        size_t left = moves[i].nbytes;
        int is_around = goes_around(left, around);
        is_proved &= source >= digested;
        while (left) {
            size_t size = least(left, PIECE_BYTES);
            if (is_around)
                copy_around(target, source, size, source + NEAR_BYTES);
            else
                memcpy(target, source, size);
            target += size, source += size, left -= size;
            if (source < digested + PIECE_BYTES)
                continue;
            if (is_around)
                XXH3_128bits_update(&state, digested, (size_t)(source - digested));
            else
                digest_and_prefetch(&state, digested, (size_t)(source - digested), source, target, left);
            digested = source;
        }
    }
    if (is_proved)
        XXH3_128bits_update(&state, digested, (size_t)(end - digested));
    else {
        XXH3_128bits_reset(&state);
        XXH3_128bits_update(&state, start, chunk->nbytes);
    }
    end_digest(&state, digest);
}

/* -- transfers ---------------------------------------------------------------------------------------------------- */

/* How a transfer ended: DONE, the peer has ended the connection, its time was up, or an error's number. */
enum { DONE = 0, ENDED = -1, LATE = -2 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Wait until a socket that does not block can go on; DONE, LATE or an error. Its shutdown ends the wait. */
static int wait_for(int fd, short event, double until_s)
{
    struct pollfd waited = {fd, event, 0};
    double left_s = until_s - now_s();
    if (left_s <= 0)
        return LATE;
    int ready = poll(&waited, 1, (int)((left_s < WAIT_S_MAX ? left_s : WAIT_S_MAX) * 1000) + 1);
    return ready < 0 && errno != EINTR ? errno : DONE;
}

/* Receive bytes and add them to a digest: what has come before each wait for more, and each piece once it is there, as
   it is in the cache then. The kernel wakes for `wake` bytes, or, if fewer are due, for the last of these and of the
   `ahead` that come next in the same chunk: waking for every segment costs more. */
static int receive_all(
    int fd, char *target, size_t nbytes, size_t ahead, double until_s, int wake, XXH3_state_t *state)
{
    size_t done = 0, digested = 0;
    while (done < nbytes) {
        size_t size = least(nbytes - done, ARRIVED_BYTES);
        ssize_t got = recv(fd, target + done, size, 0);
        if (got == 0)
            return ENDED;
        if (got > 0) {
            done += (size_t)got;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int low = (int)least(nbytes - done + ahead, (size_t)wake);
            XXH3_128bits_update(state, target + digested, done - digested);
            digested = done;
            int is_tcp = wake == 0 || setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0;
            int status = is_tcp ? wait_for(fd, POLLIN, until_s) : errno;
            if (status != DONE)
                return status;
        } else if (errno != EINTR) {
            return errno;
        }
        if (done - digested >= ARRIVED_BYTES / 2) {
            XXH3_128bits_update(state, target + digested, done - digested);
            digested = done;
        }
    }
    XXH3_128bits_update(state, target + digested, nbytes - digested);
    return DONE;
}

/* Receive chunks, each within `timeout_s`; `came` counts those that are whole. No wait asks for bytes of two chunks: if
   the sender stalled after the first, that wait would end at its deadline, and the second would have its own after. */
static int receive_chunks(
    int fd, const Place *places, size_t count, double timeout_s, int wake, unsigned char *digests, size_t *came)
{
    for (size_t first = 0, next = 0; first < count; first = next) {
        XXH3_state_t state;
        XXH3_128bits_reset(&state);
        size_t left = 0;
        do
            left += (size_t)places[next].nbytes;
        while (places[next++].goes_on && next < count);
        double until_s = now_s() + timeout_s;
        for (const Place *place = places + first; place < places + next; place++) {
            size_t nbytes = (size_t)place->nbytes;
            left -= nbytes;
            int status = receive_all(fd, at(place->target), nbytes, left, until_s, wake, &state);
            if (status != DONE)
                return status;
        }
        end_digest(&state, digests + (*came)++ * DIGEST_BYTES);
    }
    return DONE;
}

/* Send all of some views, and count what was sent. */
static int send_all(int fd, struct iovec *views, size_t count, double until_s, size_t *sent)
{
    while (count) {
        struct msghdr message = {0};
        message.msg_iov = views, message.msg_iovlen = least(count, VIEWS_MAX);
        ssize_t went = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (went < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int status = wait_for(fd, POLLOUT, until_s);
            if (status != DONE)
                return status;
        } else if (went < 0 && errno != EINTR) {
            return errno;
        }
        size_t left = went < 0 ? 0 : (size_t)went;
        *sent += left;
        for (; count && left >= views->iov_len; views++, count--)
            left -= views->iov_len;
        if (count)
            views->iov_base = (char *)views->iov_base + left, views->iov_len -= left;
    }
    return DONE;
}

typedef void (*Work)(const Chunk *, const Move *, int, unsigned char *, unsigned char *);

static void each_chunk(
    Work work, const Chunk *chunks, size_t count, const Move *moves, int around, unsigned char *digests,
    unsigned char *kinds)
{
    for (size_t i = 0; i < count; i++) {
        work(&chunks[i], moves, around, digests + i * DIGEST_BYTES, kinds);
        moves += chunks[i].count;
        kinds = kinds ? kinds + chunks[i].count : NULL;
    }
    end_around();
}

/* Add a source to a target, each byte times a factor: `products` has those of the factor with all low halves of a byte,
   then with all high ones. Source: J. S. Plank et al., "Screaming fast Galois field arithmetic" (FAST 2013). */
static void add_product(char *target, const char *source, size_t nbytes, const unsigned char *products)
{
#if NEEDS_AVX2
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)products));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(products + 16)));
    __m256i half = _mm256_set1_epi8(15);
    for (; nbytes >= 32; nbytes -= 32, target += 32, source += 32) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)source), sum = _mm256_loadu_si256((const __m256i *)target);
        __m256i lower = _mm256_shuffle_epi8(low, _mm256_and_si256(bytes, half));
        __m256i upper = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi64(bytes, 4), half));
        _mm256_storeu_si256((__m256i *)target, _mm256_xor_si256(sum, _mm256_xor_si256(lower, upper)));
    }
#endif
    for (size_t i = 0; i < nbytes; i++) {
        unsigned char byte = (unsigned char)source[i];
        target[i] ^= (char)(products[byte & 15] ^ products[16 + (byte >> 4)]);
    }
}

#if NEEDS_AVX2
#pragma GCC pop_options /* if what follows used them, the refusal itself would fail */
#endif

/* -- what Python calls -------------------------------------------------------------------------------------------- */

/* Return the rows of a table, or NULL with an exception; the bytes are kept alive by the caller's arguments. */
static const void *rows_of(const char *table, Py_ssize_t nbytes, size_t *count)
{
    if (nbytes % sizeof(Move) || (uintptr_t)table % sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "a table must have whole rows of three 64-bit numbers, aligned");
        return NULL;
    }
    *count = (size_t)nbytes / sizeof(Move);
    return table;
}

/* Return whether each chunk's moves lie in it, and are in order if `is_put`; ValueError set if not. */
static int is_sound(const Chunk *chunks, size_t count, const Move *moves, size_t moves_count, int is_put)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t floor = chunks[i].address, end = floor + chunks[i].nbytes;
        int is_inside = end >= floor && chunks[i].count <= moves_count;
        for (uint64_t j = 0; is_inside && j < chunks[i].count; j++) {
            uint64_t first = is_put ? moves[j].target : moves[j].source;
            is_inside = floor <= first && first <= end && moves[j].nbytes <= end - first;
            floor = is_put ? first + moves[j].nbytes : floor;
        }
        if (!is_inside) {
            PyErr_Format(PyExc_ValueError, "the moves of chunk %zu do not lie in it, in order", i);
            return 0;
        }
        moves += chunks[i].count, moves_count -= chunks[i].count;
    }
    if (moves_count)
        PyErr_Format(PyExc_ValueError, "%zu moves are of no chunk", moves_count);
    return !moves_count;
}

static PyObject *run(PyObject *args, Work work)
{
    const char *chunks_table, *moves_table, *kinds;
    Py_ssize_t chunks_nbytes, moves_nbytes, kinds_count;
    size_t count, moves_count;
    int around;
    if (!PyArg_ParseTuple(
            args, "y#y#y#p", &chunks_table, &chunks_nbytes, &moves_table, &moves_nbytes, &kinds, &kinds_count, &around))
        return NULL;
    const Chunk *chunks = rows_of(chunks_table, chunks_nbytes, &count);
    const Move *moves = chunks ? rows_of(moves_table, moves_nbytes, &moves_count) : NULL;
    if (!moves || !is_sound(chunks, count, moves, moves_count, work == put_chunk))
        return NULL;
    size_t known = 0;
    while (known < (size_t)kinds_count && (unsigned char)kinds[known] < KINDS_COUNT)
        known++;
    if (known < (size_t)kinds_count || (known && known != moves_count)) {
        PyErr_SetString(PyExc_ValueError, "there must be no kinds, or a known one for each move");
        return NULL;
    }
    PyObject *digests = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * DIGEST_BYTES));
    PyObject *bad = digests ? PyBytes_FromStringAndSize(NULL, kinds_count) : NULL; /* a new one, to be written */
    if (!bad) {
        Py_XDECREF(digests);
        return NULL;
    }
    unsigned char *into = (unsigned char *)PyBytes_AsString(digests);
    unsigned char *looked = kinds_count ? memcpy(PyBytes_AsString(bad), kinds, (size_t)kinds_count) : NULL;
    Py_BEGIN_ALLOW_THREADS
    each_chunk(work, chunks, count, moves, around, into, looked);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("NN", digests, bad);
}

static PyObject *add(PyObject *self, PyObject *args)
{
    unsigned long long target, source, nbytes;
    const char *products;
    Py_ssize_t products_nbytes;
    if (!PyArg_ParseTuple(args, "KKKy#", &target, &source, &nbytes, &products, &products_nbytes))
        return NULL;
    if (products_nbytes != 32) {
        PyErr_SetString(PyExc_ValueError, "a factor has 32 products: with all low and all high halves of a byte");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    add_product(at(target), at(source), (size_t)nbytes, (const unsigned char *)products);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *put(PyObject *self, PyObject *args) { return run(args, put_chunk); }

static PyObject *get(PyObject *self, PyObject *args) { return run(args, get_chunk); }

static PyObject *move(PyObject *self, PyObject *args)
{
    const char *table;
    Py_ssize_t nbytes;
    size_t count;
    int around;
    if (!PyArg_ParseTuple(args, "y#p", &table, &nbytes, &around))
        return NULL;
    const Move *moves = rows_of(table, nbytes, &count);
    if (!moves)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    make_moves(moves, count, around);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *receive(PyObject *self, PyObject *args)
{
    const char *table;
    Py_ssize_t nbytes;
    size_t count, came = 0;
    int fd, wake, status;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy#di", &fd, &table, &nbytes, &timeout_s, &wake))
        return NULL;
    const Place *places = rows_of(table, nbytes, &count);
    PyObject *digests = places ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * DIGEST_BYTES)) : NULL;
    if (!digests)
        return NULL;
    unsigned char *into = (unsigned char *)PyBytes_AsString(digests);
    Py_BEGIN_ALLOW_THREADS
    status = receive_chunks(fd, places, count, timeout_s, wake, into, &came);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("inN", status, (Py_ssize_t)came, digests);
}

static PyObject *send_views(PyObject *self, PyObject *args)
{
    const char *table;
    Py_ssize_t nbytes;
    size_t count, sent = 0;
    int fd, status;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy#d", &fd, &table, &nbytes, &timeout_s))
        return NULL;
    const Move *rows = rows_of(table, nbytes, &count);
    struct iovec *views = rows ? PyMem_Malloc((count + 1) * sizeof *views) : NULL;
    if (!views)
        return rows ? PyErr_NoMemory() : NULL;
    for (size_t i = 0; i < count; i++)
        views[i].iov_base = at(rows[i].source), views[i].iov_len = (size_t)rows[i].nbytes;
    Py_BEGIN_ALLOW_THREADS
    status = send_all(fd, views, count, now_s() + timeout_s, &sent);
    Py_END_ALLOW_THREADS
    PyMem_Free(views);
    return Py_BuildValue("iK", status, (unsigned long long)sent);
}

static PyMethodDef methods[] = {
    {"receive_chunks", receive, METH_VARARGS,
     "receive_chunks(fd, places, timeout_s, wake): return how it ended, how many chunks came, and the digest of each."},
    {"send", send_views, METH_VARARGS, "send(fd, views, timeout_s): return how it ended, and the bytes sent."},
    {"put", put, METH_VARARGS,
     "put(chunks, moves, kinds, around): make the moves; return the chunks' digests, and which moves are not finite."},
    {"get", get, METH_VARARGS, "get(chunks, moves, b'', around): make the moves; return the chunks' digests, and b''."},
    {"move", move, METH_VARARGS, "move(moves, around): make the moves."},
    {"add", add, METH_VARARGS, "add(target, source, nbytes, products): add the source to the target, times a factor."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Copies with digests, without the interpreter's lock.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (!is_supported()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no AVX2, for which this helper was built");
        return NULL;
    }
    PyObject *created = PyModule_Create(&module);
    if (created && (PyModule_AddIntConstant(created, "HAS_AROUND", HAS_AROUND) < 0 ||
                    PyModule_AddIntConstant(created, "VERSION", VERSION) < 0)) {
        Py_DECREF(created);
        return NULL;
    }
    return created;
}
