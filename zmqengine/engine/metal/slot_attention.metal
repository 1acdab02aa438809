// Attention of single tokens over slots of all pools. A threadgroup has one token and HEADS query heads with the same
// keys; its simdgroups take columns in turn, and are joined at the end. `tokens`: of each the index of its queries, its
// pool, its slot, the column behind the last one that it sees, and the columns of a slot of that pool.
//
// Template: T, D (dimensions of a head), GROUP (query heads with the same keys), HEADS, KEY_HEADS, WINDOW (0 for none),
// SINKS, CAPPED, SIMDGROUPS. `numbers`: the scale of scores, and their cap.
constexpr int LANES = 32;
constexpr int TABLE = 5;
// Dimensions of a lane: LANES apart, so that lanes read neighbours.
constexpr int EACH = (D + LANES - 1) / LANES;

threadgroup float part_most[SIMDGROUPS * HEADS];
threadgroup float part_total[SIMDGROUPS * HEADS];
threadgroup float part_sums[SIMDGROUPS * D];

const int lane = thread_index_in_simdgroup;
const int part = simdgroup_index_in_threadgroup;
const int thread_index = part * LANES + lane;
const int row = threadgroup_position_in_grid.y;
const int first = threadgroup_position_in_grid.x * HEADS;
const int all_heads = KEY_HEADS * GROUP;

const int token = tokens[row * TABLE];
const int pool = tokens[row * TABLE + 1];
const int end = tokens[row * TABLE + 3];
const int capacity = tokens[row * TABLE + 4];
const int begin = WINDOW > 0 && end > WINDOW ? end - WINDOW : 0;
const device T* all_keys[8] = {keys0, keys1, keys2, keys3, keys4, keys5, keys6, keys7};
const device T* all_values[8] = {values0, values1, values2, values3, values4, values5, values6, values7};
const size_t slot = ((size_t)tokens[row * TABLE + 2] * KEY_HEADS + first / GROUP) * capacity * D;
const device T* slot_keys = all_keys[pool] + slot;
const device T* slot_values = all_values[pool] + slot;

float query[HEADS][EACH], sums[HEADS][EACH], most[HEADS], total[HEADS];
for (int head = 0; head < HEADS; head++) {
  most[head] = -INFINITY;
  total[head] = 0;
  for (int each = 0; each < EACH; each++) {
    const int dim = each * LANES + lane;
    sums[head][each] = 0;
    query[head][each] = dim < D ? numbers[0] * (float)queries[((size_t)token * all_heads + first + head) * D + dim] : 0;
  }
}

for (int column = begin + part; column < end; column += SIMDGROUPS) {
  float key[EACH], value[EACH];
  for (int each = 0; each < EACH; each++) {
    const int dim = each * LANES + lane;
    key[each] = dim < D ? (float)slot_keys[(size_t)column * D + dim] : 0;
    value[each] = dim < D ? (float)slot_values[(size_t)column * D + dim] : 0;
  }
  for (int head = 0; head < HEADS; head++) {
    float score = 0;
    for (int each = 0; each < EACH; each++) score += query[head][each] * key[each];
    score = simd_sum(score);
    if (CAPPED) score = numbers[1] * tanh(score / numbers[1]);
    // The sums are relative to the largest score so far.
    const float above = max(most[head], score);
    const float kept = exp(most[head] - above), share = exp(score - above);
    most[head] = above;
    total[head] = total[head] * kept + share;
    for (int each = 0; each < EACH; each++) sums[head][each] = sums[head][each] * kept + share * value[each];
  }
}

if (lane == 0) {
  for (int head = 0; head < HEADS; head++) {
    part_most[part * HEADS + head] = most[head];
    part_total[part * HEADS + head] = total[head];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int head = 0; head < HEADS; head++) {
  float above = SINKS ? (float)sinks[first + head] : -INFINITY;
  for (int other = 0; other < SIMDGROUPS; other++) above = max(above, part_most[other * HEADS + head]);
  float whole = SINKS ? exp((float)sinks[first + head] - above) : 0;
  for (int other = 0; other < SIMDGROUPS; other++) {
    whole += part_total[other * HEADS + head] * exp(part_most[other * HEADS + head] - above);
  }
  const float share = exp(most[head] - above) / whole;
  for (int each = 0; each < EACH; each++) {
    const int dim = each * LANES + lane;
    if (dim < D) part_sums[part * D + dim] = share * sums[head][each];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int dim = thread_index; dim < D; dim += SIMDGROUPS * LANES) {
    float sum = 0;
    for (int other = 0; other < SIMDGROUPS; other++) sum += part_sums[other * D + dim];
    attended[((size_t)row * all_heads + first + head) * D + dim] = (T)sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
