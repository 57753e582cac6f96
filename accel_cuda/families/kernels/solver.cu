// What cuSOLVER and cuBLAS have no functions for: elements that are not finite, triangles, pivots as numpy counts them, determinants, singular values that count,
// lengths of columns, and eigenvectors of pairs.

#define KERNEL(name) extern "C" __global__ void name

template <class T> struct Parts { typedef T real; };
template <class R> struct Parts<Complex<R>> { typedef R real; };

template <class R> DEVICE bool is_finite(R x) { return x - x == R(0); }
template <class R> DEVICE bool is_finite(Complex<R> x) { return is_finite(x.re) && is_finite(x.im); }
template <class R> DEVICE double real_of(R x) { return (double)x; }
template <class R> DEVICE double real_of(Complex<R> x) { return (double)x.re; }
template <class R> DEVICE double imaginary_of(R x) { return 0.0; }
template <class R> DEVICE double imaginary_of(Complex<R> x) { return (double)x.im; }
template <class R> DEVICE void put(R* to, double re, double im) { *to = (R)re; }
template <class R> DEVICE void put(Complex<R>* to, double re, double im) { *to = Complex<R>{(R)re, (R)im}; }
template <class R> DEVICE R times(R x, R by) { return x * by; }
template <class R> DEVICE Complex<R> times(Complex<R> x, R by) { return Complex<R>{x.re * by, x.im * by}; }

DEVICE i64 first_element() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 step() { return (i64)gridDim.x * blockDim.x; }

// *flag becomes 1 if a square matrix has an element that is not finite. part: 0 is all of it, 1 the lower triangle, 2 the upper one.
template <class T> DEVICE void finite(const T* x, i32* flag, i64 count, i64 columns, i64 part) {
  for (i64 i = first_element(); i < count; i += step()) {
    const i64 row = i / columns, column = i % columns;
    if (part == 1 && column > row || part == 2 && column < row) continue;
    if (!is_finite(x[i])) *flag = 1;
  }
}

// All words of x become this one if the flag is there.
template <class W> DEVICE void blank(const i32* flag, W* x, i64 count, W word) {
  if (!*flag) return;
  for (i64 i = first_element(); i < count; i += step()) x[i] = word;
}

// Of matrices of so many rows and columns, one triangle is left. Where there is an info, a diagonal element that is NaN is told as its number, from 1 on.
template <class T> DEVICE void triangle(T* x, i32* info, i64 count, i64 rows, i64 columns, i64 upper) {
  for (i64 i = first_element(); i < count; i += step()) {
    const i64 row = i / columns % rows, column = i % columns;
    if (upper ? column < row : column > row) put(&x[i], 0.0, 0.0);
    if (!info || row != column || real_of(x[i]) == real_of(x[i])) continue;
    i32* told = &info[i / (rows * columns)];
    const i32 mine = (i32)row + 1;
    for (i32 seen = 0;;) {
      const i32 before = atomicCAS(told, seen, mine);
      if (before == seen || before && before <= mine) break;
      seen = before;
    }
  }
}

// Unit matrices.
template <class T> DEVICE void eye(T* x, i64 count, i64 rows, i64 columns) {
  for (i64 i = first_element(); i < count; i += step()) put(&x[i], i / columns % rows == i % columns ? 1.0 : 0.0, 0.0);
}

// The sign and the logarithm of the absolute value of a determinant, or the determinant itself if there is no place for the logarithm. One block of 256 threads.
template <class T> DEVICE void det(const T* lu, const i64* piv, T* sign, typename Parts<T>::real* log_of, i64 n) {
  __shared__ double re[256], im[256], logs[256];
  const int thread = threadIdx.x;
  double x = 1.0, y = 0.0, sum = 0.0;
  for (i64 i = thread; i < n; i += 256) {
    double a = real_of(lu[i * n + i]), b = imaginary_of(lu[i * n + i]);
    const double size = Kind<T>::complex ? hypot(a, b) : fabs(a);
    a = size == 0.0 ? 0.0 : a / size;
    b = size == 0.0 ? 0.0 : b / size;
    if (piv[i] != i + 1) a = -a, b = -b;
    const double turned = x * a - y * b;
    y = x * b + y * a;
    x = turned;
    sum += log(size);
  }
  re[thread] = x, im[thread] = y, logs[thread] = sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    const double a = re[thread], b = im[thread], c = re[thread + half], d = im[thread + half];
    re[thread] = a * c - b * d, im[thread] = a * d + b * c;
    logs[thread] += logs[thread + half];
  }
  if (thread) return;
  const double size = log_of ? 1.0 : exp(logs[0]);
  // A part that is 0 stays 0 where the absolute value is infinite.
  put(sign, re[0] == 0.0 ? 0.0 : re[0] * size, im[0] == 0.0 ? 0.0 : im[0] * size);
  if (log_of) *log_of = (typename Parts<T>::real)logs[0];
}

// Columns of u are divided by the singular values that count: those above rtol times the largest. The others become 0. *rank, where there is one, is their number.
template <class T>
DEVICE void scaled(T* u, const typename Parts<T>::real* s, i64* rank, i64 rows, i64 columns, double rtol) {
  typedef typename Parts<T>::real R;
  const R least = (R)rtol * s[0];
  for (i64 i = first_element(); i < rows * columns; i += step()) {
    const R value = s[i / rows];
    u[i] = value > least ? times(u[i], R(1) / value) : T{};
  }
  if (!rank || first_element()) return;
  i64 found = 0;
  while (found < columns && s[found] > least) ++found;
  *rank = found;
}

// The squared lengths of columns; one block of 256 threads takes one.
template <class T> DEVICE void lengths(const T* x, typename Parts<T>::real* out, i64 rows, i64 columns) {
  __shared__ double sums[256];
  const int thread = threadIdx.x;
  double sum = 0.0;
  for (i64 row = thread; row < rows; row += 256) {
    const T value = x[row * columns + blockIdx.x];
    sum += real_of(value) * real_of(value) + imaginary_of(value) * imaginary_of(value);
  }
  sums[thread] = sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (!thread) out[blockIdx.x] = (typename Parts<T>::real)sums[0];
}

// Eigenvectors of a real matrix, which the library gives as real and imaginary parts of each pair in two columns, column-major.
template <class R> DEVICE void pairs(const R* x, const Complex<R>* w, Complex<R>* v, i64 n) {
  for (i64 i = first_element(); i < n * n; i += step()) {
    const i64 row = i / n, column = i % n;
    const R im = w[column].im;
    if (im == R(0)) v[i] = Complex<R>{x[column * n + row], R(0)};
    else if (im > R(0)) v[i] = Complex<R>{x[column * n + row], x[(column + 1) * n + row]};
    else v[i] = Complex<R>{x[(column - 1) * n + row], -x[column * n + row]};
  }
}

#define SOLVER(T)                                                                                                                        \
  KERNEL(solver_finite_##T)(const T* x, i32* flag, i64 count, i64 columns, i64 part) { finite(x, flag, count, columns, part); }           \
  KERNEL(solver_triangle_##T)(T* x, i32* info, i64 count, i64 rows, i64 columns, i64 upper) {                                             \
    triangle(x, info, count, rows, columns, upper);                                                                                      \
  }                                                                                                                                      \
  KERNEL(solver_eye_##T)(T* x, i64 count, i64 rows, i64 columns) { eye(x, count, rows, columns); }                                        \
  KERNEL(solver_det_##T)(const T* lu, const i64* piv, T* sign, Parts<T>::real* log_of, i64 n) { det(lu, piv, sign, log_of, n); }          \
  KERNEL(solver_scaled_##T)(T* u, const Parts<T>::real* s, i64* rank, i64 rows, i64 columns, double rtol) {                               \
    scaled(u, s, rank, rows, columns, rtol);                                                                                             \
  }                                                                                                                                      \
  KERNEL(solver_lengths_##T)(const T* x, Parts<T>::real* out, i64 rows, i64 columns) { lengths(x, out, rows, columns); }

SOLVER(f32)
SOLVER(f64)
SOLVER(c64)
SOLVER(c128)

KERNEL(solver_pairs_f32)(const f32* x, const c64* w, c64* v, i64 n) { pairs(x, w, v, n); }
KERNEL(solver_pairs_f64)(const f64* x, const c128* w, c128* v, i64 n) { pairs(x, w, v, n); }

KERNEL(solver_blank_4)(const i32* flag, u32* x, i64 count, u32 word) { blank(flag, x, count, word); }
KERNEL(solver_blank_8)(const i32* flag, u64* x, i64 count, u64 word) { blank(flag, x, count, word); }

// Pivots: the library has them as int64 and counts from 1. What is given may be wrong: the status,
// which was 0, tells of one, and no row outside the matrix is touched.
KERNEL(solver_piv_out)(const i64* x, i32* y, i64 n) {
  for (i64 i = first_element(); i < n; i += step()) y[i] = (i32)(x[i] - 1);
}
KERNEL(solver_piv_in)(const i32* x, i64* y, i64* status, i64 n) {
  for (i64 i = first_element(); i < n; i += step()) {
    const i64 row = x[i];
    if (row < 0 || row >= n) status[1] = row, status[0] = 1;
    y[i] = min(max(row, 0ll), n - 1) + 1;
  }
}
