// Convolution as a product of matrices that are never built: y[image, filter, pixel] = sum over taps of f[filter, tap] * x[image, channel, position].
// A block makes FILTERS x 128 results, pixels of all images in a row, STEP taps at a time; gridDim.z blocks share the taps of one such tile, and leave
// partial results that conv2d_end adds up.

struct Shape { i64 n, c, h, w, k, r, s, p, q, stride_y, stride_x, pad_y, pad_x, taps_each; };

template <class T> struct Exact { typedef float type; };
template <> struct Exact<f64> { typedef double type; };

constexpr int PIXELS = 128, NOWHERE = 1 << 30;

// What a thread knows of its pixel: where its window begins.
template <class T> struct Window {
  const T* image;
  int row, col;
  DEVICE Window(const T* x, const Shape& g, i64 pixel) {
    i64 image_of = pixel / (g.p * g.q), rest = pixel - image_of * (g.p * g.q);
    bool is_there = pixel < g.n * g.p * g.q;
    row = is_there ? (int)(rest / g.q * g.stride_y - g.pad_y) : NOWHERE, col = (int)(rest % g.q * g.stride_x - g.pad_x);
    image = x + (image_of * g.c * g.h + row) * g.w + col;
  }
};

// Where a tap lies, from its window's beginning: offset in elements, and row and column. Beyond the last tap, a row that no image has.
struct alignas(16) Tap { int offset, row, col, unused; };
// The taps of one thread, so many apart from each other. The next one is found by an addition of mixed radix: divisions would keep all others waiting.
template <int STEP> struct Walk {
  i64 tap, end;
  int c, r, s, by_c, by_r, by_s, height, width, rows, columns;
  DEVICE Walk(const Shape& g, i64 tap, i64 end) : tap(tap), end(end), height((int)g.h), width((int)g.w), rows((int)g.r), columns((int)g.s) {
    int t = (int)tap, window = rows * columns;
    c = t / window, t -= c * window, r = t / columns, s = t - r * columns;
    t = STEP, by_c = t / window, t -= by_c * window, by_r = t / columns, by_s = t - by_r * columns;
  }
  DEVICE Tap next() {
    Tap now = tap < end ? Tap{(c * height + r) * width + s, r, s, 0} : Tap{0, NOWHERE, 0, 0};
    tap += STEP, s += by_s, r += by_r, c += by_c;
    if (s >= columns) s -= columns, ++r;
    if (r >= rows) r -= rows, ++c;
    return now;
  }
};

// A load that is not made where it must not be. Written as such, and not as a branch, several of them are on their way at a time.
template <class T> DEVICE T load_if(bool is_there, const T* p);
#define LOAD_IF(T, type, constraint, value, zero)                                                                           \
  template <> DEVICE T load_if(bool is_there, const T* p) {                                                                 \
    T to;                                                                                                                   \
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %2, 0; mov.b" type " %0, " zero "; @there ld.global.nc.b" type " %0, [%1]; }" \
                 : "=" constraint(value) : "l"(p), "r"((u32)is_there));                                                     \
    return to;                                                                                                              \
  }
LOAD_IF(f16, "16", "h", to.bits, "0")
LOAD_IF(bf16, "16", "h", to.bits, "0")
LOAD_IF(f32, "32", "f", to, "0")
LOAD_IF(f64, "64", "d", to, "0")

template <class T> DEVICE T fetch(const Window<T>& window, const Tap& tap, u32 height, u32 width) {
  bool is_there = (u32)(window.row + tap.row) < height && (u32)(window.col + tap.col) < width;
  return load_if(is_there, window.image + tap.offset);
}

template <class T, class W> DEVICE void deliver(T* y, W* partial, const Shape& g, i64 pixel, i64 filter, W value) {
  i64 pixels = g.n * g.p * g.q;
  if (pixel >= pixels || filter >= g.k) return;
  u32 plane = (u32)(g.p * g.q);
  i64 image = pixels <= 0xffffffffll ? (i64)((u32)pixel / plane) : pixel / plane;
  i64 out = (image * g.k + filter) * plane + (pixel - image * plane);
  if (gridDim.z > 1) partial[blockIdx.z * pixels * g.k + out] = value;
  else y[out] = narrow<T>(value);
}

// -- without tensor cores: a thread makes FILTERS / 16 x 8 results

template <class W> struct alignas(16) Four { W v[4]; };

template <int FILTERS, class T> DEVICE void convolve(const T* __restrict__ x, const T* __restrict__ f, T* y, typename Exact<T>::type* partial, const Shape& g) {
  typedef typename Exact<T>::type W;
  constexpr int STEP = 8, M = FILTERS / 16, TAPS = STEP / 2, LOADS = FILTERS * STEP / 256;
  __shared__ alignas(16) W left[2][STEP][FILTERS + 4];
  __shared__ alignas(16) W right[2][STEP][PIXELS];
  __shared__ Tap table[2][STEP];
  const i64 taps = g.c * g.r * g.s, begin = blockIdx.z * g.taps_each, end = min(begin + g.taps_each, taps), filter0 = (i64)blockIdx.y * FILTERS;
  const int mine = threadIdx.x % PIXELS, part = threadIdx.x / PIXELS * TAPS;
  const Window<T> window(x, g, (i64)blockIdx.x * PIXELS + mine);
  // Threads next to each other fetch taps next to each other of a filter.
  const int tap_of_mine = threadIdx.x % STEP, filter_of_mine = threadIdx.x / STEP;
  const int filters_left = (int)min(g.k - filter0 - filter_of_mine, 1ll << 20);
  const T* source = f + (filter0 + filter_of_mine) * taps + begin + tap_of_mine;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  W acc[M][8] = {};
  T pixels[TAPS], filters[LOADS];
  auto bring = [&](i64 tap0, int place) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k) pixels[k] = fetch(window, table[place][part + k], (u32)g.h, (u32)g.w);
    bool is_tap = tap0 + tap_of_mine < end;
#pragma unroll
    for (int k = 0; k < LOADS; ++k) filters[k] = load_if(is_tap && k * (256 / STEP) < filters_left, source + k * (256 / STEP) * taps);
    source += STEP;
  };
  auto store = [&](int place) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k) right[place][part + k][mine] = (W)widen(pixels[k]);
#pragma unroll
    for (int k = 0; k < LOADS; ++k) left[place][tap_of_mine][filter_of_mine + k * (256 / STEP)] = (W)widen(filters[k]);
  };
  Walk<STEP> walk(g, begin + threadIdx.x % STEP, end);
  if (threadIdx.x < STEP) table[0][threadIdx.x] = walk.next(), table[1][threadIdx.x] = walk.next();
  __syncthreads();
  bring(begin, 0);
  store(0);
  __syncthreads();
  int place = 0;
  for (i64 tap0 = begin; tap0 < end; tap0 += STEP, place ^= 1) {
    bool is_more = tap0 + STEP < end;
    if (is_more) bring(tap0 + STEP, place ^ 1);
    if (threadIdx.x < STEP) table[place][threadIdx.x] = walk.next();
#pragma unroll
    for (int step = 0; step < STEP; ++step) {
      Four<W> a[M / 4], b[2];
#pragma unroll
      for (int i = 0; i < M / 4; ++i) a[i] = *(const Four<W>*)&left[place][step][ty * 4 + i * 64];
#pragma unroll
      for (int j = 0; j < 2; ++j) b[j] = *(const Four<W>*)&right[place][step][tx * 4 + j * 64];
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] += a[i / 4].v[i % 4] * b[j / 4].v[j % 4];
    }
    if (is_more) store(place ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < M; ++i)
      deliver(y, partial, g, (i64)blockIdx.x * PIXELS + tx * 4 + j % 4 + j / 4 * 64, filter0 + ty * 4 + i % 4 + i / 4 * 64, acc[i][j]);
}

// -- on tensor cores, for the 16-bit floats: a warp makes FILTERS / 2 x 32 results

template <class T> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
#if __CUDA_ARCH__ >= 800
#define MULTIPLY(T, name)                                                                                                       \
  template <> DEVICE void multiply<T>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"     \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                                        \
  }
MULTIPLY(f16, "f16")
MULTIPLY(bf16, "bf16")

template <int FILTERS, class T> DEVICE void convolve_16(const T* __restrict__ x, const T* __restrict__ f, T* y, float* partial, const Shape& g) {
  constexpr int STEP = 32, M = FILTERS / 32, TAPS = STEP / 2, LOADS = FILTERS * STEP / 8 / 256;
  // Rows are 16 bytes longer than they need be, so that eight of them begin in different banks.
  __shared__ alignas(16) T left[2][FILTERS][STEP + 8];
  __shared__ alignas(16) T right[2][STEP][PIXELS + 8];
  __shared__ Tap table[2][STEP];
  const i64 taps = g.c * g.r * g.s, begin = blockIdx.z * g.taps_each, end = min(begin + g.taps_each, taps), filter0 = (i64)blockIdx.y * FILTERS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A thread fetches two pixels next to each other, at 8 of the taps: they are stored as one word.
  const int mine = threadIdx.x % (PIXELS / 2) * 2, part = threadIdx.x / (PIXELS / 2) * (TAPS / 2);
  const Window<T> first(x, g, (i64)blockIdx.x * PIXELS + mine), second(x, g, (i64)blockIdx.x * PIXELS + mine + 1);
  const bool is_whole = taps % 8 == 0 && aligned16(f);
  const int row0 = warp / 4 * (FILTERS / 2), column0 = warp % 4 * 32;
  float acc[M][4][4] = {};
  T pixels[TAPS / 2][2];
  Pack<T, 8> filters[LOADS];
  auto bring = [&](i64 tap0, int place) {
#pragma unroll
    for (int k = 0; k < TAPS / 2; ++k) {
      Tap tap = table[place][part + k];
      pixels[k][0] = fetch(first, tap, (u32)g.h, (u32)g.w), pixels[k][1] = fetch(second, tap, (u32)g.h, (u32)g.w);
    }
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      int index = threadIdx.x + k * 256;
      i64 filter = filter0 + index / (STEP / 8), tap = tap0 + index % (STEP / 8) * 8;
      if (is_whole && filter < g.k && tap < end) {
        filters[k] = *(const Pack<T, 8>*)(f + filter * taps + tap);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) filters[k].v[j] = filter < g.k && tap + j < end ? f[filter * taps + tap + j] : T{};
      }
    }
  };
  auto store = [&](int place) {
#pragma unroll
    for (int k = 0; k < TAPS / 2; ++k) *(u32*)&right[place][part + k][mine] = pixels[k][0].bits | (u32)pixels[k][1].bits << 16;
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      int index = threadIdx.x + k * 256;
      *(Pack<T, 8>*)&left[place][index / (STEP / 8)][index % (STEP / 8) * 8] = filters[k];
    }
  };
  Walk<STEP> walk(g, begin + threadIdx.x % STEP, end);
  if (threadIdx.x < STEP) table[0][threadIdx.x] = walk.next(), table[1][threadIdx.x] = walk.next();
  __syncthreads();
  bring(begin, 0);
  store(0);
  __syncthreads();
  int place = 0;
  for (i64 tap0 = begin; tap0 < end; tap0 += STEP, place ^= 1) {
    bool is_more = tap0 + STEP < end;
    if (is_more) bring(tap0 + STEP, place ^ 1);
    if (threadIdx.x < STEP) table[place][threadIdx.x] = walk.next();
#pragma unroll
    for (int step = 0; step < STEP; step += 16) {
      u32 a[M][4], b[2][4];
#pragma unroll
      for (int i = 0; i < M; ++i) {
        u32 from = (u32)__cvta_generic_to_shared(&left[place][row0 + i * 16 + lane % 16][step + lane / 16 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3]) : "r"(from) : "memory");
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 from = (u32)__cvta_generic_to_shared(&right[place][step + lane % 16][column0 + j * 16 + lane / 16 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[j][0]), "=r"(b[j][1]), "=r"(b[j][2]), "=r"(b[j][3]) : "r"(from) : "memory");
      }
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply<T>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
    if (is_more) store(place ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        deliver(y, partial, g, (i64)blockIdx.x * PIXELS + column0 + j * 8 + lane % 4 * 2 + e % 2, filter0 + row0 + i * 16 + lane / 4 + e / 2 * 8, acc[i][j][e]);
}
#else
template <int FILTERS, class T> DEVICE void convolve_16(const T* __restrict__ x, const T* __restrict__ f, T* y, float* partial, const Shape& g) {
  convolve<FILTERS>(x, f, y, partial, g);
}
#endif

template <class T> DEVICE void conclude(const typename Exact<T>::type* partial, T* y, i64 n, i64 parts) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  auto sum = partial[i];
  for (i64 part = 1; part < parts; ++part) sum += partial[part * n + i];
  y[i] = narrow<T>(sum);
}

// -- as a product that cuBLAS makes, for the 16-bit floats

// The matrix [taps, ld] of what each tap sees at the pixels from pixel0 on; zeros where there is nothing. A block writes 512 pixels of 32 taps.
template <class T> DEVICE void columns(const T* __restrict__ x, T* to, const Shape& g, i64 pixel0, i64 ld) {
  __shared__ Tap table[32];
  const i64 taps = g.c * g.r * g.s, tap0 = (i64)blockIdx.y * 32, place = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (threadIdx.x < 32) table[threadIdx.x] = Walk<32>(g, tap0 + threadIdx.x, taps).next();
  __syncthreads();
  if (place >= ld) return;
  const Window<T> first(x, g, pixel0 + place), second(x, g, pixel0 + place + 1);
  const int many = (int)min(32ll, taps - tap0);
  u32* row = (u32*)(to + tap0 * ld + place);
#pragma unroll 8
  for (int k = 0; k < many; ++k, row += ld / 2) {
    T a = fetch(first, table[k], (u32)g.h, (u32)g.w), b = fetch(second, table[k], (u32)g.h, (u32)g.w);
    *row = a.bits | (u32)b.bits << 16;
  }
}

// From [filters, ld] to where the results belong.
template <class T> DEVICE void spread(const T* from, T* y, i64 filters, i64 plane, i64 pixel0, i64 count, i64 ld) {
  const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x, pixel = pixel0 + place, filter = blockIdx.y;
  if (place >= count) return;
  const i64 image = pixel <= 0xffffffffll ? (i64)((u32)pixel / (u32)plane) : pixel / plane;
  y[(image * filters + filter) * plane + pixel - image * plane] = from[filter * ld + place];
}

#define CONV2D_COLUMNS(T)                                                                                                       \
  extern "C" __global__ void conv2d_columns_##T(const T* x, T* to, Shape g, i64 pixel0, i64 ld) { columns(x, to, g, pixel0, ld); } \
  extern "C" __global__ void conv2d_spread_##T(const T* from, T* y, i64 filters, i64 plane, i64 pixel0, i64 count, i64 ld) {     \
    spread(from, y, filters, plane, pixel0, count, ld);                                                                         \
  }
CONV2D_COLUMNS(f16) CONV2D_COLUMNS(bf16)

#define CONV2D_AS(way, T, filters)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, sizeof(T) == 8 || filters == 128 ? 1 : 2) conv2d_##filters##_##T(const T* x, const T* f, T* y, Exact<T>::type* partial, Shape g) { \
    way<filters>(x, f, y, partial, g);                                                                                                  \
  }
#define CONV2D_END(T) \
  extern "C" __global__ void conv2d_end_##T(const Exact<T>::type* partial, T* y, i64 n, i64 parts) { conclude(partial, y, n, parts); }
CONV2D_AS(convolve_16, f16, 64) CONV2D_END(f16)
CONV2D_AS(convolve_16, bf16, 64) CONV2D_END(bf16)
CONV2D_AS(convolve, f32, 64) CONV2D_AS(convolve, f32, 128) CONV2D_END(f32)
CONV2D_AS(convolve, f64, 64) CONV2D_END(f64)
