// Convolution as a product of matrices that are read in place, and attention with an online softmax.

template <class T> struct Exact { typedef float type; };
template <> struct Exact<f64> { typedef double type; };

// out[pixel, filter] = sum over taps of patch[pixel, tap] * filter[filter, tap]. A block makes 64 pixels x 64 filters, 16 taps at a time.
struct Shape { i64 n, c, h, w, k, r, s, p, q, stride_y, stride_x, pad_y, pad_x; };

template <class T> DEVICE void convolve(const T* __restrict__ x, const T* __restrict__ f, T* __restrict__ y, const Shape& g) {
  typedef typename Exact<T>::type W;
  constexpr int TILE = 64, STEP = 16;
  __shared__ W left[STEP][TILE + 1], right[STEP][TILE + 1];
  i64 pixels = g.n * g.p * g.q, taps = g.c * g.r * g.s;
  i64 pixel0 = (i64)blockIdx.x * TILE, filter0 = (i64)blockIdx.y * TILE;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  // Each thread fetches one pixel's taps and one filter's taps, four of each step.
  int mine = threadIdx.x % TILE, first = threadIdx.x / TILE;
  i64 pixel = pixel0 + mine, filter = filter0 + mine;
  i64 image = pixel / (g.p * g.q), row = pixel / g.q % g.p * g.stride_y - g.pad_y, col = pixel % g.q * g.stride_x - g.pad_x;
  W acc[4][4] = {};
  for (i64 tap0 = 0; tap0 < taps; tap0 += STEP) {
    for (int step = first; step < STEP; step += 4) {
      i64 tap = tap0 + step, c = tap / (g.r * g.s), yy = row + tap / g.s % g.r, xx = col + tap % g.s;
      bool inside = pixel < pixels && tap < taps && yy >= 0 && yy < g.h && xx >= 0 && xx < g.w;
      left[step][mine] = inside ? (W)widen(x[((image * g.c + c) * g.h + yy) * g.w + xx]) : W(0);
      right[step][mine] = filter < g.k && tap < taps ? (W)widen(f[filter * taps + tap]) : W(0);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEP; ++step) {
      // Where there is no tap both factors are 0, so that nothing gets in from there.
      W a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) { a[i] = left[step][tx + 16 * i]; b[i] = right[step][ty + 16 * i]; }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += a[i] * b[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      i64 out = pixel0 + tx + 16 * i, k = filter0 + ty + 16 * j;
      if (out < pixels && k < g.k) y[(out / (g.p * g.q) * g.k + k) * g.p * g.q + out % (g.p * g.q)] = narrow<T>(acc[i][j]);
    }
}

// A warp takes ROWS queries of one head, its lanes 32 keys at a time. Query i sees the first `first + i` keys, as far as there are so many.
constexpr int ROWS = 4;

template <class W> DEVICE W across(W value, int offset);
template <> DEVICE float across(float value, int offset) { return __shfl_xor_sync(0xffffffffu, value, offset); }
template <> DEVICE double across(double value, int offset) { return __shfl_xor_sync(0xffffffffu, value, offset); }

template <class T>
DEVICE void attend(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ o, i64 groups, i64 seq_q,
                   i64 seq_kv, i64 dim, double scale, i64 first) {
  typedef typename Exact<T>::type W;
  extern __shared__ __align__(16) char storage[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const W infinity = (W)__int_as_float(0x7f800000);
  W* query = (W*)storage + (i64)warp * (2 * ROWS * dim + ROWS * 32);
  W *result = query + ROWS * dim, *weights = result + ROWS * dim;
  i64 tiles = (seq_q + ROWS - 1) / ROWS, tile = (i64)blockIdx.x * (blockDim.x / 32) + warp;
  if (tile >= tiles * groups) return;  // whole warps: no barrier of the block follows
  i64 head = tile / tiles, row0 = tile % tiles * ROWS;
  int rows = (int)min((i64)ROWS, seq_q - row0);
  q += (head * seq_q + row0) * dim, o += (head * seq_q + row0) * dim, k += head * seq_kv * dim, v += head * seq_kv * dim;
  for (i64 d = lane; d < ROWS * dim; d += 32) {
    query[d] = d < rows * dim ? (W)widen(q[d]) * (W)scale : W(0);
    result[d] = W(0);
  }
  W most[ROWS], total[ROWS];
  i64 seen[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    most[r] = -infinity, total[r] = W(0);
    seen[r] = r < rows ? max((i64)0, min(seq_kv, first + row0 + r)) : 0;
  }
  __syncwarp();
  for (i64 key0 = 0; key0 < seen[rows - 1]; key0 += 32) {
    W score[ROWS] = {};
    i64 key = key0 + lane;
    if (key < seq_kv)
      for (i64 d = 0; d < dim; ++d) {
        W each = (W)widen(k[key * dim + d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) score[r] += query[r * dim + d] * each;
      }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (key0 >= seen[r]) { weights[r * 32 + lane] = W(0); continue; }
      bool visible = key < seen[r];
      W high = visible ? score[r] : -infinity;
      for (int offset = 16; offset; offset /= 2) { W other = across(high, offset); high = larger(high, other); }
      high = larger(high, most[r]);
      W weight = visible ? exp(score[r] - high) : W(0), sum = weight, shrink = exp(most[r] - high);
      for (int offset = 16; offset; offset /= 2) sum += across(sum, offset);
      total[r] = total[r] * shrink + sum, most[r] = high;
      weights[r * 32 + lane] = weight;
      for (i64 d = lane; d < dim; d += 32) result[r * dim + d] *= shrink;
    }
    __syncwarp();
    for (i64 d = lane; d < dim; d += 32) {
      W sum[ROWS];
      for (int r = 0; r < ROWS; ++r) sum[r] = result[r * dim + d];
      for (int j = 0; j < 32 && key0 + j < seq_kv; ++j) {
        W each = (W)widen(v[(key0 + j) * dim + d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          if (key0 + j < seen[r]) sum[r] += weights[r * 32 + j] * each;  // a NaN that is not seen must not get in
      }
      for (int r = 0; r < ROWS; ++r) result[r * dim + d] = sum[r];
    }
    __syncwarp();
  }
  for (i64 d = lane; d < rows * dim; d += 32) {
    int r = (int)(d / dim);
    W sum = r == 0 ? total[0] : r == 1 ? total[1] : r == 2 ? total[2] : total[3];
    i64 count = r == 0 ? seen[0] : r == 1 ? seen[1] : r == 2 ? seen[2] : seen[3];
    o[d] = narrow<T>(count ? result[d] / sum : W(0));
  }
}

#define DNN(T)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) conv2d_##T(const T* x, const T* f, T* y, Shape g) { convolve(x, f, y, g); }  \
  extern "C" __global__ void attention_##T(const T* q, const T* k, const T* v, T* o, i64 groups, i64 seq_q, i64 seq_kv, i64 dim, \
                                           double scale, i64 first) {                                                            \
    attend(q, k, v, o, groups, seq_q, seq_kv, dim, scale, first);                                                                \
  }
