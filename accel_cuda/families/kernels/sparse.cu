// What cuSPARSE does not say of a triangular matrix: whether its diagonal has a 0, or lacks an element.

#define KERNEL(name) extern "C" __global__ void name

template <class T> DEVICE bool is_zero(T x) { return x == T(0); }
template <class R> DEVICE bool is_zero(Complex<R> x) { return x.re == R(0) && x.im == R(0); }

// One thread takes one row (of csc, a column). *info becomes the number, from 1 on, of the first without a diagonal element; it was 0.
template <class T, class I> DEVICE void diagonal(const T* data, const I* indices, const I* indptr, i32* info, i64 n) {
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  for (I k = indptr[row], end = indptr[row + 1]; k < end; ++k)
    if (indices[k] == row && !is_zero(data[k])) return;
  const i32 mine = (i32)row + 1;
  for (i32 seen = 0;;) {
    const i32 before = atomicCAS(info, seen, mine);
    if (before == seen || before <= mine && before) return;
    seen = before;
  }
}

#define DIAGONAL(T, I, bytes)                                                                                                     \
  KERNEL(sparse_diagonal_##T##_##bytes)(const T* data, const I* indices, const I* indptr, i32* info, i64 n) {                     \
    diagonal(data, indices, indptr, info, n);                                                                                     \
  }

DIAGONAL(f32, i32, 4) DIAGONAL(f64, i32, 4) DIAGONAL(c64, i32, 4) DIAGONAL(c128, i32, 4)
DIAGONAL(f32, i64, 8) DIAGONAL(f64, i64, 8) DIAGONAL(c64, i64, 8) DIAGONAL(c128, i64, 8)
