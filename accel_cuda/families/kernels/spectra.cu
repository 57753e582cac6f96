// What is made of transforms of cuFFT: sums of cosines and sines, convolutions, and frequencies. It follows fft.cu.

DEVICE void sine_cosine(f32 x, f32* s, f32* c) { sincospif(x, s, c); }
DEVICE void sine_cosine(f64 x, f64* s, f64* c) { sincospi(x, s, c); }
// exp(i * pi * p / q)
template <class R> DEVICE Complex<R> turned(i64 p, i64 q) {
  R s, c;
  sine_cosine((R)p / (R)q, &s, &c);
  return Complex<R>{c, s};
}

// x and y are (before, n, behind); z is what cuFFT transforms, one row of `width` elements for each line along n.
// `way` is the type of the sums; 5 is type 4 of an odd length. Sums of sines are those of cosines of elements in another order, with other signs: `flags` says which.
constexpr int FLIP_IN = 1, SIGN_IN = 2, FLIP_OUT = 4, SIGN_OUT = 8, SINE = 16;

template <class R> struct Line {
  const R* x;
  i64 n, behind;
  int way, flags;
  R ends;  // what the ends are multiplied by
  DEVICE R at(i64 j) const {
    if (j >= n) return R(0);
    i64 place = flags & FLIP_IN ? n - 1 - j : j;
    R value = x[place * behind];
    if (flags & SIGN_IN && place % 2) value = -value;
    if (way == 1 && !(flags & SINE) ? j == 0 || j == n - 1 : way == 3 && j == 0) value *= ends;
    return value;
  }
  // Element m of a row of reals: the line mirrored, or its even elements and then the odd ones from behind.
  DEVICE R real_at(i64 m) const {
    if (way == 2) return at(m < (n + 1) / 2 ? 2 * m : 2 * (n - m) - 1);
    if (!(flags & SINE)) return at(m < n ? m : 2 * (n - 1) - m);
    if (m == 0 || m == n + 1) return R(0);
    return m <= n ? at(m - 1) : -at(2 * n + 1 - m);
  }
  DEVICE Complex<R> complex_at(i64 m) const {
    if (way == 3) {
      R low = at(m), high = at(n - m);
      return mul(turned<R>(m, 2 * n), Complex<R>{low, -high});
    }
    if (way == 4) return mul(Complex<R>{at(2 * m), at(n - 1 - 2 * m)}, turned<R>(-(4 * m + 1), 4 * n));
    return mul(Complex<R>{at(m), R(0)}, turned<R>(-m, 2 * n));
  }
};
template <class R, class T> DEVICE void cosine_in(const R* x, T* z, i64 size, i64 n, i64 behind, i64 width, i64 way, i64 flags, f64 ends) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  i64 b = i, k = split(b, behind), m = split(b, width);
  Line<R> line = {x + b * n * behind + k, n, behind, (int)way, (int)flags, (R)ends};
  if constexpr (Kind<T>::complex) z[(b * behind + k) * width + m] = line.complex_at(m);
  else z[(b * behind + k) * width + m] = line.real_at(m);
}
template <class R> DEVICE R cosine_of(const void* row, i64 j, i64 n, int way, int flags) {
  const Complex<R>* z = (const Complex<R>*)row;
  if (way == 1) return flags & SINE ? -z[j + 1].im : z[j].re;
  if (way == 3) return ((const R*)row)[j % 2 ? n - 1 - j / 2 : j / 2];
  if (way == 4) {
    i64 k = j % 2 ? (n - 1 - j) / 2 : j / 2;
    Complex<R> value = mul(z[k], turned<R>(-k, n));
    return j % 2 ? R(-2) * value.im : R(2) * value.re;
  }
  if (way == 5) return R(2) * mul(z[j], turned<R>(-(2 * j + 1), 4 * n)).re;
  Complex<R> value = j <= n / 2 ? z[j] : Complex<R>{z[n - j].re, -z[n - j].im};
  return R(2) * mul(value, turned<R>(-j, 2 * n)).re;
}
template <class R> DEVICE void cosine_out(const void* z, R* y, i64 size, i64 n, i64 behind, i64 nbytes, i64 way, i64 flags, f64 scale, f64 ends) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  i64 b = i, k = split(b, behind), place = split(b, n), j = flags & FLIP_OUT ? n - 1 - place : place;
  R value = cosine_of<R>((const char*)z + (b * behind + k) * nbytes, j, n, (int)way, (int)flags) * (R)scale;
  if (flags & SIGN_OUT && place % 2) value = -value;
  if (way == 1 && !(flags & SINE) ? j == 0 || j == n - 1 : way == 2 && j == 0) value *= (R)ends;
  y[i] = value;
}
#define COSINE_IN(name, R, T)                                                                                                               \
  extern "C" __global__ void fft_cosine_in_##name(const R* x, T* z, i64 size, i64 n, i64 behind, i64 width, i64 way, i64 flags, f64 ends) { \
    cosine_in(x, z, size, n, behind, width, way, flags, ends);                                                                              \
  }
#define COSINE_OUT(name, R)                                                                                                                   \
  extern "C" __global__ void fft_cosine_out_##name(const void* z, R* y, i64 size, i64 n, i64 behind, i64 nbytes, i64 way, i64 flags, f64 scale, \
                                                   f64 ends) {                                                                                \
    cosine_out(z, y, size, n, behind, nbytes, way, flags, scale, ends);                                                                       \
  }
COSINE_IN(f32, f32, f32)
COSINE_IN(f64, f64, f64)
COSINE_IN(c64, f32, c64)
COSINE_IN(c128, f64, c128)
COSINE_OUT(f32, f32)
COSINE_OUT(f64, f64)

// Arrays of up to three axes in larger ones: y is (batch, p, q, r), of which (l, m, n) is x, reversed or conjugated; the rest is 0.
template <class T> DEVICE T conjugated(T x) {
  if constexpr (Kind<T>::complex) return T{x.re, -x.im};
  else return x;
}
template <class T> DEVICE void framed(const T* x, T* y, i64 size, i64 l, i64 m, i64 n, i64 p, i64 q, i64 r, i64 is_turned) {
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 b = at, k = split(b, r), j = split(b, q), i = split(b, p);
  T value = {};
  if (i < l && j < m && k < n) {
    if (is_turned) i = l - 1 - i, j = m - 1 - j, k = n - 1 - k;
    value = x[((b * l + i) * m + j) * n + k];
    if (is_turned) value = conjugated(value);
  }
  y[at] = value;
}
// y is (batch, l, m, n), the part of x, (batch, p, q, r), that begins at (u, v, w).
template <class T> DEVICE void cropped(const T* x, T* y, i64 size, i64 l, i64 m, i64 n, i64 p, i64 q, i64 r, i64 u, i64 v, i64 w) {
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 b = at, k = split(b, n), j = split(b, m), i = split(b, l);
  y[at] = x[((b * p + i + u) * q + j + v) * r + k + w];
}
#define FRAMES(name, T)                                                                                                                       \
  extern "C" __global__ void fft_frame_##name(const T* x, T* y, i64 size, i64 l, i64 m, i64 n, i64 p, i64 q, i64 r, i64 is_turned) {          \
    framed(x, y, size, l, m, n, p, q, r, is_turned);                                                                                          \
  }                                                                                                                                           \
  extern "C" __global__ void fft_crop_##name(const T* x, T* y, i64 size, i64 l, i64 m, i64 n, i64 p, i64 q, i64 r, i64 u, i64 v, i64 w) {     \
    cropped(x, y, size, l, m, n, p, q, r, u, v, w);                                                                                           \
  }
FRAMES(f32, f32)
FRAMES(f64, f64)
FRAMES(c64, c64)
FRAMES(c128, c128)

// z = a * b * factor; z may be one of them. One of them may have fewer elements, for each part of the other.
template <class T> DEVICE void product(const T* a, const T* b, T* z, i64 size, i64 size_a, i64 size_b, f64 factor) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  i64 rest = i, place = size_a < size ? split(rest, size_a) : size_b < size ? split(rest, size_b) : i;
  T value = mul(a[size_a < size ? place : i], b[size_b < size ? place : i]);
  value.re *= factor;
  value.im *= factor;
  z[i] = value;
}
extern "C" __global__ void fft_product_c64(const c64* a, const c64* b, c64* z, i64 size, i64 size_a, i64 size_b, f64 factor) {
  product(a, b, z, size, size_a, size_b, factor);
}
extern "C" __global__ void fft_product_c128(const c128* a, const c128* b, c128* z, i64 size, i64 size_a, i64 size_b, f64 factor) {
  product(a, b, z, size, size_a, size_b, factor);
}

template <class R> DEVICE void conjugate(Complex<R>* x, i64 size) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) x[i].im = -x[i].im;
}
extern "C" __global__ void fft_conjugate_c64(c64* x, i64 size) { conjugate(x, size); }
extern "C" __global__ void fft_conjugate_c128(c128* x, i64 size) { conjugate(x, size); }

template <class R> DEVICE void frequencies(R* y, i64 size, i64 positive, i64 n, f64 step) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) y[i] = (R)((f64)(i < positive ? i : i - n) * step);
}
extern "C" __global__ void fft_frequencies_f32(f32* y, i64 size, i64 positive, i64 n, f64 step) { frequencies(y, size, positive, n, step); }
extern "C" __global__ void fft_frequencies_f64(f64* y, i64 size, i64 positive, i64 n, f64 step) { frequencies(y, size, positive, n, step); }
