// What cuSPARSE does not do. It copies no diagonal, and does not say whether that of a triangular matrix has a 0, or lacks an element. It takes blocks apart for
// few types only. It reads wherever indices say. And it makes a sparse matrix of a dense one only after the host has learned how many elements there are, so that a graph could not, and writes
// as many as there are.

#define KERNEL(name) extern "C" __global__ void name

template <class T> DEVICE bool is_zero(T x) { return widen(x) == typename Wide<T>::type(0); }
template <class R> DEVICE bool is_zero(Complex<R> x) { return x.re == R(0) && x.im == R(0); }

DEVICE void tell(i64* status, i64 code, i64 number) {
  if (!atomicCAS((u64*)status, 0ull, (u64)code)) status[1] = number;
}

// Whether a row (of csc, a column) begins at element t. Whatever indptr says, nothing else is read.
template <class I> DEVICE bool begins(const I* indptr, i64 marks, i64 t) {
  i64 first = 0, last = marks;
  while (first < last) {
    const i64 middle = first + (last - first) / 2;
    if (indptr[middle] < t) first = middle + 1;
    else last = middle;
  }
  return first < marks && indptr[first] == t;
}

// Copies indices and indptr (of coo, which has a row for each element, rows). The status, which was 0, gets a code and a number if one of them is out of range, or
// out of order: accel.sparse_ref says which. `major` and `minor` are how many rows and columns there are; of csc, columns and rows.
template <class I>
DEVICE void check(const I* indices, const I* indptr, I* out_indices, I* out_indptr, i64* status, i64 count, i64 marks, i64 major, i64 minor,
                  i64 is_coo, i64 is_sorted) {
  const i64 most = max(count, marks);
  for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < most; t += (i64)gridDim.x * blockDim.x) {
    if (t < count) {
      const I index = indices[t];
      if (index < 0 || index >= minor) tell(status, 1, index);
      else if (is_sorted && t && index <= indices[t - 1] && !begins(indptr, marks, t)) tell(status, 3, t);
      out_indices[t] = index;
    }
    if (t >= marks) continue;
    const I mark = indptr[t];
    if (is_coo && (mark < 0 || mark >= major)) tell(status, 1, mark);
    else if (t ? mark < indptr[t - 1] : !is_coo && mark != 0) tell(status, 2, t);
    else if (!is_coo && t == marks - 1 && mark != count) tell(status, 2, t);
    out_indptr[t] = mark;
  }
}

// Where the status tells of something, elements fill rows one after the other; the last row takes what is left.
template <class I> DEVICE void replace(I* indices, I* indptr, const i64* status, i64 count, i64 marks, i64 major, i64 minor, i64 is_coo) {
  if (!*status) return;
  const i64 most = max(count, marks), each = max((i64)1, min(minor, count)), filled = (count + each - 1) / each;
  for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x; t < most; t += (i64)gridDim.x * blockDim.x) {
    const i64 row = min(t / each, major - 1);
    if (t < count) indices[t] = (I)min(t - row * each, minor - 1);
    if (t < marks) indptr[t] = (I)(is_coo ? row : t == marks - 1 || t >= filled ? count : t * each);
  }
}

#define CHECKED(I, bytes)                                                                                                         \
  KERNEL(sparse_check_##bytes)(const I* indices, const I* indptr, I* out_indices, I* out_indptr, i64* status, i64 count,           \
                               i64 marks, i64 major, i64 minor, i64 is_coo, i64 is_sorted) {                                      \
    check(indices, indptr, out_indices, out_indptr, status, count, marks, major, minor, is_coo, is_sorted);                       \
  }                                                                                                                               \
  KERNEL(sparse_replace_##bytes)(I* indices, I* indptr, const i64* status, i64 count, i64 marks, i64 major, i64 minor,             \
                                 i64 is_coo) {                                                                                    \
    replace(indices, indptr, status, count, marks, major, minor, is_coo);                                                         \
  }
CHECKED(i32, 4) CHECKED(i64, 8)

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

// One thread takes one row (of csc, a column), whose indices are in order. out was 0.
template <class T, class I> DEVICE void extract(const T* data, const I* indices, const I* indptr, T* out, i64 n) {
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  const I end = indptr[row + 1];
  I first = indptr[row], last = end;
  while (first < last) {
    const I middle = first + (last - first) / 2;
    if (indices[middle] < row) first = middle + 1;
    else last = middle;
  }
  if (first < end && indices[first] == row) out[row] = data[first];
}

// One thread takes one element of coo. out was 0.
template <class T, class I> DEVICE void extract_of_coo(const T* data, const I* columns, const I* rows, T* out, i64 nnz) {
  const i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (k < nnz && rows[k] == columns[k]) out[rows[k]] = data[k];
}

// Returns the row of block k: the last one that begins at or before it.
template <class I> DEVICE i64 row_of(const I* indptr, i64 rows, i64 k) {
  i64 first = 0, last = rows;
  while (last - first > 1) {
    const i64 middle = first + (last - first) / 2;
    if (indptr[middle] <= k) first = middle;
    else last = middle;
  }
  return first;
}

// One thread takes one element of the blocks, which are `height` x `width`; the first ones also mark where the rows begin.
template <class T, class I>
DEVICE void blocks_csr(const T* data, const I* indices, const I* indptr, T* out, I* out_indices, I* out_indptr, i64 rows, i64 height,
                       i64 width, i64 nnz) {
  const i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t < nnz) {
    const i64 k = t / (height * width), row = t / width % height, column = t % width, block_row = row_of(indptr, rows, k);
    const i64 before = indptr[block_row], inside = indptr[block_row + 1] - before;
    const i64 place = (before * height + row * inside + (k - before)) * width + column;
    out[place] = data[t], out_indices[place] = (I)(indices[k] * width + column);
  }
  if (t <= rows * height) {
    const i64 block_row = t / height, row = t % height, before = indptr[block_row];
    out_indptr[t] = (I)(before * height * width + (row ? row * (indptr[block_row + 1] - before) * width : 0));
  }
}

// One thread takes one element of the blocks. out was 0.
template <class T, class I>
DEVICE void blocks_dense(const T* data, const I* indices, const I* indptr, T* out, i64 rows, i64 height, i64 width, i64 columns, i64 nnz) {
  const i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= nnz) return;
  const i64 k = t / (height * width), row = row_of(indptr, rows, k) * height + t / width % height;
  out[row * columns + indices[k] * width + t % width] = data[t];
}

// A warp takes a row of x. indptr[1 + row] becomes the number of its elements that are not 0; their running sums make it what its name says.
template <class T, class I> DEVICE void count(const T* x, I* indptr, i64 rows, i64 columns) {
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  I found = 0;
  for (i64 first = 0; first < columns; first += 32) {
    const i64 column = first + threadIdx.x % 32;
    found += __popc(__ballot_sync(~0u, column < columns && !is_zero(x[row * columns + column])));
  }
  if (threadIdx.x % 32) return;
  indptr[1 + row] = found;
  if (!row) indptr[0] = 0;
}

// Writes the elements as far as there is room, and how many there are.
template <class T, class I>
DEVICE void pick(const T* x, const I* indptr, T* data, I* indices, i64* total, i64 rows, i64 columns, i64 room) {
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  i64 place = indptr[row];
  for (i64 first = 0; first < columns; first += 32) {
    const i64 column = first + threadIdx.x % 32;
    const bool is_found = column < columns && !is_zero(x[row * columns + column]);
    const u32 found = __ballot_sync(~0u, is_found);
    const i64 mine = place + __popc(found & ((1u << threadIdx.x % 32) - 1));
    if (is_found && mine < room) data[mine] = x[row * columns + column], indices[mine] = (I)column;
    place += __popc(found);
  }
  if (row == rows - 1 && threadIdx.x % 32 == 0) *total = place;
}

#define DENSE(T, I, bytes)                                                                                                        \
  KERNEL(sparse_count_##T##_##bytes)(const T* x, I* indptr, i64 rows, i64 columns) { count(x, indptr, rows, columns); }           \
  KERNEL(sparse_pick_##T##_##bytes)(                                                                                              \
      const T* x, const I* indptr, T* data, I* indices, i64* total, i64 rows, i64 columns, i64 room) {                            \
    pick(x, indptr, data, indices, total, rows, columns, room);                                                                   \
  }
#define EXTRACT(T, I, bytes)                                                                                                      \
  KERNEL(sparse_extract_##T##_##bytes)(const T* data, const I* indices, const I* indptr, T* out, i64 n) {                         \
    extract(data, indices, indptr, out, n);                                                                                       \
  }                                                                                                                               \
  KERNEL(sparse_extract_coo_##T##_##bytes)(const T* data, const I* columns, const I* rows, T* out, i64 nnz) {                     \
    extract_of_coo(data, columns, rows, out, nnz);                                                                                \
  }
#define BLOCKS(T, I, bytes)                                                                                                       \
  KERNEL(sparse_blocks_csr_##T##_##bytes)(const T* data, const I* indices, const I* indptr, T* out, I* out_indices,               \
                                          I* out_indptr, i64 rows, i64 height, i64 width, i64 columns, i64 nnz) {                 \
    blocks_csr(data, indices, indptr, out, out_indices, out_indptr, rows, height, width, nnz);                                    \
  }                                                                                                                               \
  KERNEL(sparse_blocks_dense_##T##_##bytes)(const T* data, const I* indices, const I* indptr, T* out, i64 rows, i64 height,       \
                                            i64 width, i64 columns, i64 nnz) {                                                    \
    blocks_dense(data, indices, indptr, out, rows, height, width, columns, nnz);                                                  \
  }
#define DIAGONAL(T, I, bytes)                                                                                                     \
  KERNEL(sparse_diagonal_##T##_##bytes)(const T* data, const I* indices, const I* indptr, i32* info, i64 n) {                     \
    diagonal(data, indices, indptr, info, n);                                                                                     \
  }

DIAGONAL(f32, i32, 4) DIAGONAL(f64, i32, 4) DIAGONAL(c64, i32, 4) DIAGONAL(c128, i32, 4)
DIAGONAL(f32, i64, 8) DIAGONAL(f64, i64, 8) DIAGONAL(c64, i64, 8) DIAGONAL(c128, i64, 8)
DENSE(f16, i32, 4) DENSE(bf16, i32, 4) DENSE(f32, i32, 4) DENSE(f64, i32, 4) DENSE(c64, i32, 4) DENSE(c128, i32, 4)
DENSE(f16, i64, 8) DENSE(bf16, i64, 8) DENSE(f32, i64, 8) DENSE(f64, i64, 8) DENSE(c64, i64, 8) DENSE(c128, i64, 8)
EXTRACT(f16, i32, 4) EXTRACT(bf16, i32, 4) EXTRACT(f32, i32, 4) EXTRACT(f64, i32, 4) EXTRACT(c64, i32, 4) EXTRACT(c128, i32, 4)
EXTRACT(f16, i64, 8) EXTRACT(bf16, i64, 8) EXTRACT(f32, i64, 8) EXTRACT(f64, i64, 8) EXTRACT(c64, i64, 8) EXTRACT(c128, i64, 8)
BLOCKS(f16, i32, 4) BLOCKS(bf16, i32, 4) BLOCKS(f32, i32, 4) BLOCKS(f64, i32, 4) BLOCKS(c64, i32, 4) BLOCKS(c128, i32, 4)
BLOCKS(f16, i64, 8) BLOCKS(bf16, i64, 8) BLOCKS(f32, i64, 8) BLOCKS(f64, i64, 8) BLOCKS(c64, i64, 8) BLOCKS(c128, i64, 8)
