// cuBLAS skips NaN in its search for extremes, and counts places from 1. The first NaN is the largest and the smallest, as in numpy: what is written for one is
// negative, so that it is less than what cuBLAS has found.
template <class R> DEVICE void index_of_nan(i64* index, const R* x, i64 count, i64 parts) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count * parts; i += (i64)gridDim.x * blockDim.x)
    if (x[i] != x[i]) atomicMin(index, i / parts - count);
}

extern "C" __global__ void index_of_nan_f32(i64* index, const f32* x, i64 count, i64 parts) { index_of_nan(index, x, count, parts); }
extern "C" __global__ void index_of_nan_f64(i64* index, const f64* x, i64 count, i64 parts) { index_of_nan(index, x, count, parts); }

extern "C" __global__ void index_from_zero(i64* index, i64 count) { *index += *index < 0 ? count : -1; }

// Addresses of matrices that lie so many bytes apart, which calls of cuBLAS read from the device.
extern "C" __global__ void addresses_apart(u64* out, u64 first, u64 step, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = first + (u64)i * step;
}
