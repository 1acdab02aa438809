// The output of a tile; or the sums of a part of its columns, which the block that ends last joins. `ended` counts the parts
// that have ended, and is zero again after the last. No other kernel runs meanwhile: all are on one stream.
    if (parts == 1) {
      out[place * D + d] = static_cast<T>(joined.weight == 0.f ? 0.f : joined.sum / joined.weight);
    } else {
      float* to = part_sums + (((long long)(slot + part) * KH + h) * QUERIES + m) * LINE;
      to[d] = joined.sum;
      if (d == 0) {
        to[D] = joined.best;
        to[D + 1] = joined.weight;
      }
    }
  }
  if (parts == 1) return;
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* count = const_cast<int*>(ended) + slot * KH + h;
    is_last = atomicAdd(count, 1) == parts - 1;
    if (is_last) *count = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int at = threadIdx.x; at < QUERIES * D; at += WARPS * 32) {
    const int m = at / D, d = at % D, query = query0 + m;
    if (query >= G * W) break;
    const float* from = part_sums + (((long long)slot * KH + h) * QUERIES + m) * LINE;
    const long long step = (long long)KH * QUERIES * LINE;
    float highest = -1e30f;
    for (int i = 0; i < parts; i++) highest = fmaxf(highest, __ldcg(from + i * step + D));
    float total = 0.f, sum = 0.f;
    for (int i = 0; i < parts; i++) {
      const float mine = exp2f(__ldcg(from + i * step + D) - highest);
      total += __ldcg(from + i * step + D + 1) * mine;
      sum += __ldcg(from + i * step + d) * mine;
    }
    const long long place = (token0 + query % W) * heads + h * G + query / W;
    out[place * D + d] = static_cast<T>(total == 0.f ? 0.f : sum / total);
  }
