// What the next window of each row reads, from the choices of the step on its way: the last token that this one makes of
// the row, and what of the row's table comes after. It makes the tokens up to the first that is not the one that was
// drafted there. A thread takes a row, which is at `places` of that step's rows if some have left.
  const int row = blockIdx.x * blockDim.x + threadIdx.x, rows = table_shape[0];
  if (row >= rows) return;
  const int before = chosen_shape[1], columns = table_shape[1], drafts = columns - before;
  const int place = LEFT ? places[row] : row;
  const auto* own = chosen + place * before;
  int count = 1;
  while (count < before && drafted[place * (before - 1) + count - 1] == static_cast<int>(own[count - 1])) count++;
  counts[row] = count;
  inputs[row * (drafts + 1)] = own[count - 1];
  for (int i = 0; i < drafts; i++) {
    const int draft = table[row * columns + count + i];
    next_drafted[row * drafts + i] = draft;
    inputs[row * (drafts + 1) + 1 + i] = max(draft, 0);
  }
