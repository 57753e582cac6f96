// What cuFFT leaves to its callers: scaling, other layouts, and ends of a spectrum that are to count as real.

template <class T> DEVICE void scale_all(T* x, i64 n, double factor) {
  constexpr int N = Lanes<T>::count;
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i + N <= n && aligned16(x)) {
    Pack<T, N> p = *(const Pack<T, N>*)(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) p.v[k] *= (T)factor;
    *(Pack<T, N>*)(x + i) = p;
  } else {
    for (i64 end = min(i + N, n); i < end; ++i) x[i] *= (T)factor;
  }
}
extern "C" __global__ void fft_scale_f32(f32* x, i64 n, double factor) { scale_all(x, n, factor); }
extern "C" __global__ void fft_scale_f64(f64* x, i64 n, double factor) { scale_all(x, n, factor); }

// x is (outer, m, inner): frequency 0 of a real signal is real, and so is the last one if the signal's length is even.
template <class R> DEVICE void real_ends(Complex<R>* x, i64 outer, i64 m, i64 inner, i64 is_even) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= outer * inner) return;
  x += i / inner * m * inner + i % inner;
  x->im = 0;
  if (is_even) x[(m - 1) * inner].im = 0;
}
extern "C" __global__ void fft_ends_c64(c64* x, i64 outer, i64 m, i64 inner, i64 is_even) { real_ends(x, outer, m, inner, is_even); }
extern "C" __global__ void fft_ends_c128(c128* x, i64 outer, i64 m, i64 inner, i64 is_even) { real_ends(x, outer, m, inner, is_even); }

// y[b][c][r] = x[b][r][c], in tiles of 32 x 32 by blocks of 32 x 8 threads.
constexpr int TILE = 32, ROWS = 8;
template <class T> DEVICE void turn(const T* x, T* y, i64 rows, i64 columns) {
  __shared__ T tile[TILE][TILE + 1];
  i64 down = (rows + TILE - 1) / TILE, across = (columns + TILE - 1) / TILE, index = blockIdx.x;
  i64 c = index % across * TILE, r = index / across % down * TILE, batch = index / across / down * rows * columns;
  for (int i = threadIdx.y; i < TILE; i += ROWS)
    if (r + i < rows && c + threadIdx.x < columns) tile[i][threadIdx.x] = x[batch + (r + i) * columns + c + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.y; i < TILE; i += ROWS)
    if (c + i < columns && r + threadIdx.x < rows) y[batch + (c + i) * rows + r + threadIdx.x] = tile[threadIdx.x][i];
}
extern "C" __global__ void fft_turn_4(const f32* x, f32* y, i64 rows, i64 columns) { turn(x, y, rows, columns); }
extern "C" __global__ void fft_turn_8(const u64* x, u64* y, i64 rows, i64 columns) { turn(x, y, rows, columns); }
extern "C" __global__ void fft_turn_16(const c128* x, c128* y, i64 rows, i64 columns) { turn(x, y, rows, columns); }
