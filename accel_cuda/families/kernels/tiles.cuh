// Bringing pieces of arrays into shared memory, in granules of 16 bytes at multiples of 16, from wherever they begin.

constexpr u32 TILE = 24576, THREADS = 256;

// Begin to bring the granules from `base` on into shared memory, by `threads` threads of which this is one. `begin` and `end` are the array's: of what does
// not lie in it nothing is read.
template <class T> DEVICE void bring(char* tile, u64 base, u32 granules, u32 thread, u32 threads, u64 begin, u64 end) {
  if (base >= begin && base + 16ull * granules <= end) {
#pragma unroll 4
    for (u32 g = thread; g < granules; g += threads) {
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(tile + 16 * g)), "l"(base + 16ull * g) : "memory");
#else
      *(Quad*)(tile + 16 * g) = load_quad((const void*)(base + 16ull * g));
#endif
    }
  } else {
    for (u32 g = thread; g < granules; g += threads) *(Quad*)(tile + 16 * g) = load_cut<T>(base + 16ull * g, begin, end);
  }
}
DEVICE void commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until all but the last `begun` tiles are there, of what this thread brought.
template <int begun> DEVICE void arrive() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(begun) : "memory");
#endif
}
// Tiles that the device's copy engine brings: a thread asks for each part, and a barrier in shared memory knows when all of them are there. The threads have
// nothing else to do with it, which is what makes narrow elements fast.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_ENGINE = true;
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void open_barrier(u64* barrier, u32 parts) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier)), "r"(parts) : "memory");
}
DEVICE void await_barrier(u64* barrier, u32 phase) {
  u32 is_there;
  do {
    asm volatile("{ .reg .pred there; mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2; selp.u32 %0, 1, 0, there; }"
                 : "=r"(is_there) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  } while (!is_there);
}
// One part: granules from `base` on, none of them or some.
template <class T> DEVICE void bring_part(char* tile, u64 base, u32 granules, u64 begin, u64 end, u64* barrier) {
  const bool is_begin = granules && base < begin, is_end = granules > is_begin && base + 16ull * granules > end;
  if (is_begin) *(Quad*)tile = load_cut<T>(base, begin, end), base += 16, tile += 16, --granules;
  if (is_end) --granules, *(Quad*)(tile + 16 * granules) = load_cut<T>(base + 16ull * granules, begin, end);
  if (is_begin || is_end) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(16 * granules) : "memory");
  if (granules)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(tile)), "l"(base), "r"(16 * granules), "r"(shared_address(barrier)) : "memory");
}
#else
constexpr bool HAS_ENGINE = false;
DEVICE void open_barrier(u64*, u32) {}
DEVICE void await_barrier(u64*, u32) {}
template <class T> DEVICE void bring_part(char*, u64, u32, u64, u64, u64*) {}
#endif
// Bring `count` elements from `x` on, and return the offset in bytes at which the first of them lies.
template <class T> DEVICE u32 stage(char* tile, const T* x, u32 count, u64 begin, u64 end) {
  const u64 base = (u64)x & ~15ull;
  const u32 granules = (u32)(((u64)(x + count) + 15 - base) / 16);
  if constexpr (HAS_ENGINE) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) open_barrier(&barrier, 1), bring_part<T>(tile, base, granules, begin, end, &barrier);
    __syncthreads();
    await_barrier(&barrier, 0);
  } else {
    bring<T>(tile, base, granules, threadIdx.x, THREADS, begin, end);
    commit();
    arrive<0>();
    __syncthreads();
  }
  return (u32)((u64)x - base);
}
// 16 bytes in one load: the compiler would load narrow elements one by one.
DEVICE Quad take_quad(const char* place) {
  Quad to;
#ifdef __CUDA_ARCH__
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.w[0]), "=r"(to.w[1]), "=r"(to.w[2]), "=r"(to.w[3]) : "r"((u32)__cvta_generic_to_shared(place)));
#else
  to = *(const Quad*)place;
#endif
  return to;
}
