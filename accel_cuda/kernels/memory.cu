// Patterns that the driver has no fill for, the scaling that is left of a product of nothing, what benchmarks wait for, and faults on purpose.

extern "C" __global__ void fill8(u64* y, u64 low, u64 high, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = low;
}
extern "C" __global__ void fill16(u64* y, u64 low, u64 high, i64 count) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) { y[2 * i] = low; y[2 * i + 1] = high; }
}

// C = beta * C for a batch of column-major matrices; with beta == 0 C is not read.
template <class T> DEVICE void scale(T* c, i64 m, i64 n, i64 ldc, i64 stride, i64 count, double re, double im) {
  typedef typename Wide<T>::type W;
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m * n * count) return;
  T* element = c + i / (m * n) * stride + i / m % n * ldc + i % m;
  if constexpr (Kind<T>::complex) {
    typedef decltype(element->re) R;
    *element = re == 0 && im == 0 ? T{} : mul(T{(R)re, (R)im}, *element);
  } else {
    *element = re == 0 ? T{} : narrow<T>((W)re * widen(*element));
  }
}
#define SCALE(T)                                                                                                          \
  extern "C" __global__ void scale_##T(T* c, i64 m, i64 n, i64 ldc, i64 stride, i64 count, double re, double im) {         \
    scale(c, m, n, ldc, stride, count, re, im);                                                                           \
  }
SCALE(f16) SCALE(bf16) SCALE(f32) SCALE(f64) SCALE(c64) SCALE(c128)

extern "C" __global__ void empty() {}
extern "C" __global__ void spin(u64 nanoseconds) {
  u64 start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
extern "C" __global__ void poison() { *(volatile int*)0x10 = 1; }
extern "C" __global__ void hang(volatile int* flag) {
  while (*flag == 0) __nanosleep(1000);
}
