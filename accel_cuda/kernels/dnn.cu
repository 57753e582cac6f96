// Convolution as a product of matrices that are read in place.

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

#define DNN(T) \
  extern "C" __global__ void __launch_bounds__(256) conv2d_##T(const T* x, const T* f, T* y, Shape g) { convolve(x, f, y, g); }
