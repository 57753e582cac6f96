// What the kernels of attention share. Each query i sees the first `first + i` keys, as far as there are so many.
//
// Weights are powers of two: scores are multiplied by log2(e), so that exp2 of a difference is the weight. `most` is the largest score seen so far
// and `total` the sum of the weights that were taken relative to it. A part that saw no score yet has most = -infinity, which is never subtracted:
// `level` puts 0 in its place, so that -infinity - -infinity does not make a NaN where there is none.

typedef unsigned char byte;

constexpr double LOG2E = 1.4426950408889634;

template <class T> struct Exact { typedef float type; };
template <> struct Exact<f64> { typedef double type; };

DEVICE float power2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE double power2(double x) { return exp2(x); }
DEVICE float most_of(float a, float b) { return fmaxf(a, b); }
DEVICE double most_of(double a, double b) { return fmax(a, b); }
template <class W> DEVICE W infinity() { return (W)__int_as_float(0x7f800000); }
template <class W> DEVICE W level(W most) { return most == -infinity<W>() ? W(0) : most; }
template <class W> DEVICE W from_lane(W value, int offset) { return __shfl_xor_sync(0xffffffffu, value, offset); }

struct Sizes { i64 seq_q, seq_kv, dim, first; };
DEVICE i64 seen_by(const Sizes& g, i64 query) { return max((i64)0, min(g.seq_kv, g.first + query)); }

// 16 bytes of one row into shared memory, from column `column` on; what lies beyond the row's end, or in a row that is not `inside`, becomes 0.
// `width` is how many bytes every row's start is aligned to: rows are copied by pieces of that size, if it is less than 16.
template <class T> DEVICE void fetch(void* to, const T* row, int column, int dim, bool inside, int width) {
  constexpr int COUNT = 16 / sizeof(T);
#if __CUDA_ARCH__ >= 800
  u32 target = (u32)__cvta_generic_to_shared(to);
  if (width == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int at = column + i * COUNT / 2;
      bool any = inside && at < dim;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target + 8 * i), "l"(any ? row + at : row), "r"(any ? 8 : 0) : "memory");
    }
    return;
  }
  if (width == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = column + i * COUNT / 4;
      bool any = inside && at < dim;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target + 4 * i), "l"(any ? row + at : row), "r"(any ? 4 : 0) : "memory");
    }
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < COUNT; ++i) ((T*)to)[i] = inside && column + i < dim ? row[column + i] : narrow<T>((typename Wide<T>::type)0);
}

#if __CUDA_ARCH__ >= 800
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// How wide the pieces are that rows of `dim` elements can be copied by.
template <class T> DEVICE int piece(const void* q, const void* k, const void* v, i64 dim) {
  u64 all = (u64)q | (u64)k | (u64)v | (u64)(dim * sizeof(T));
  return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : (int)sizeof(T);
}

// A tile of ROWS rows of CHUNKS pieces of 16 bytes; `place` says where a piece lies, and 8 rows further it is 8 * PITCH bytes on.
template <class T, int ROWS, int CHUNKS, int THREADS, int PITCH, class Place>
DEVICE void fetch_tile(byte* tile, const T* from, i64 row0, i64 rows, int dim, int width, Place place) {
  constexpr int STEP = THREADS / CHUNKS, COUNT = 16 / sizeof(T);
  static_assert(THREADS % CHUNKS == 0, "a thread keeps its column");
  const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
  const int left = (int)min((i64)ROWS, rows - row0) - first;
#if __CUDA_ARCH__ >= 800
  if (width == 16) {
    const T* source = from + (row0 + first) * dim + chunk * COUNT;
    const u32 target = (u32)__cvta_generic_to_shared(tile) + place(first, chunk);
    const int reach = chunk * COUNT < dim ? left : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
      if (ROWS % STEP == 0 || first + i < ROWS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + i * PITCH), "l"(source), "r"(i < reach ? 16 : 0) : "memory");
      source += (i64)STEP * dim;
    }
    return;
  }
#endif
#pragma unroll 1
  for (int i = 0; first + i < ROWS; i += STEP)
    fetch<T>(tile + place(first, chunk) + i * PITCH, from + (row0 + first + i) * dim, chunk * COUNT, dim, i < left, width);
}

// Where the parts of a row lie whose keys were split over blocks: sums of split s at part + s * rows * dim, then all (most, total) pairs.
template <class W> struct Parts {
  W* base;
  i64 rows, dim;
  int splits;
  DEVICE W* sums(i64 split, i64 row) const { return base + (split * rows + row) * dim; }
  DEVICE W* scales(i64 split, i64 row) const { return base + splits * rows * dim + (split * rows + row) * 2; }
};

// Put the parts of 32 elements a block together, by 8 threads for each.
template <class T> DEVICE void finish(const void* workspace, T* __restrict__ o, i64 rows, const Sizes& g, i64 splits) {
  typedef typename Exact<T>::type W;
  __shared__ W share[3][8][32];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const i64 at = (i64)blockIdx.x * 32 + x, element = min(at, rows * g.dim - 1), row = element / g.dim, column = element % g.dim;
  Parts<W> parts{(W*)workspace, rows, g.dim, (int)splits};
  W most = -infinity<W>(), sum = W(0), total = W(0);
#pragma unroll 4
  for (i64 s = y; s < splits; s += 8) most = most_of(most, parts.scales(s, row)[0]);
#pragma unroll 4
  for (i64 s = y; s < splits; s += 8) {
    const W* scales = parts.scales(s, row);
    W weight = power2(scales[0] - level(most));
    sum += weight * parts.sums(s, row)[column], total += weight * scales[1];
  }
  share[0][y][x] = most, share[1][y][x] = sum, share[2][y][x] = total;
  __syncthreads();
  if (y || at >= rows * g.dim) return;
  sum = W(0), total = W(0);
#pragma unroll
  for (int i = 0; i < 8; ++i) most = most_of(most, share[0][i][x]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    W weight = power2(share[0][i][x] - level(most));
    sum += weight * share[1][i][x], total += weight * share[2][i][x];
  }
  o[at] = narrow<T>(seen_by(g, row % g.seq_q) ? sum / total : W(0));
}
