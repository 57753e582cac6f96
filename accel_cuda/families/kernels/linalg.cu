// Products of matrices of integers, which no library of NVIDIA's has but for bytes.

constexpr int SIDE = 32, LINES = 8;  // a block computes SIDE x SIDE elements by SIDE x LINES threads

// Rows, columns and steps are counted in elements; y is (batch, m, n) in C order. Sums wrap around.
template <class T> DEVICE void matmul(
    const T* a, const T* b, T* y, i64 m, i64 n, i64 k, i64 row_a, i64 column_a, i64 step_a, i64 row_b, i64 column_b, i64 step_b, i64 batch) {
  typedef Unsigned<T> U;
  __shared__ U left[SIDE][SIDE + 1], right[SIDE][SIDE + 1];
  const i64 across = (n + SIDE - 1) / SIDE;
  const i64 top = blockIdx.x / across * SIDE, first = blockIdx.x % across * SIDE;
  const int x = threadIdx.x, line = threadIdx.y;
  const i64 column = first + x;
  for (i64 z = blockIdx.y; z < batch; z += gridDim.y) {
    U sums[SIDE / LINES] = {};
    for (i64 at = 0; at < k; at += SIDE) {
#pragma unroll
      for (int i = line; i < SIDE; i += LINES) {
        left[i][x] = top + i < m && at + x < k ? (U)a[z * step_a + (top + i) * row_a + (at + x) * column_a] : U(0);
        right[i][x] = at + i < k && column < n ? (U)b[z * step_b + (at + i) * row_b + column * column_b] : U(0);
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < SIDE; ++j) {
        const U factor = right[j][x];
#pragma unroll
        for (int i = 0; i < SIDE / LINES; ++i) sums[i] += left[line + i * LINES][j] * factor;
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SIDE / LINES; ++i) {
      const i64 row = top + line + i * LINES;
      if (row < m && column < n) y[(z * m + row) * n + column] = (T)sums[i];
    }
  }
}

#define MATMUL(T)                                                                                                                            \
  extern "C" __global__ void matmul_##T(                                                                                                     \
      const T* a, const T* b, T* y, i64 m, i64 n, i64 k, i64 row_a, i64 column_a, i64 step_a, i64 row_b, i64 column_b, i64 step_b,           \
      i64 batch) {                                                                                                                           \
    matmul<T>(a, b, y, m, n, k, row_a, column_a, step_a, row_b, column_b, step_b, batch);                                                    \
  }
