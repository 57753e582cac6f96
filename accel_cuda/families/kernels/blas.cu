// cuBLAS counts the places of extremes from 1.
extern "C" __global__ void index_from_zero(i64* index) { *index -= 1; }

// Addresses of matrices that lie so many bytes apart, which calls of cuBLAS read from the device.
extern "C" __global__ void addresses_apart(u64* out, u64 first, u64 step, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = first + (u64)i * step;
}
