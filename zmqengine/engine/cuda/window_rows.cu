// The row and the queries of a block, where all rows have W tokens.
  constexpr int QUERIES = 16;
  const int key_heads = k_shape[1], heads = q_shape[1], W = q_shape[2];
  const int G = heads / key_heads;
  const int b = blockIdx.x / key_heads, h = blockIdx.x % key_heads;
  const bool apart = (int)gridDim.y * QUERIES < G * W;
  const int query0 = blockIdx.y * (apart ? WARPS : 1) * QUERIES;
  const int first = starts[b], end = stop[0];
  const long long token0 = (long long)b * W, head_step = q_strides[1], token_step = q_strides[2];
  const long long key_step = k_strides[2], value_step = v_strides[2];
  const T* queries = q + b * q_strides[0] + h * G * head_step;
  const T* keys = k + b * k_strides[0] + h * k_strides[1];
  const T* values = v + b * v_strides[0] + h * v_strides[1];
  const bool holes = hidden_strides[0] > 1;
  const unsigned char* marks = hidden + b * hidden_strides[0];
