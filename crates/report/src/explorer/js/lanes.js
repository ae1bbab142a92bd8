// Finding events by time. In a lane no two events overlap, so starts and ends are both in order.

// The first of [low, high) whose value is greater than `limit`.
const firstAbove = (values, low, high, limit) => {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
};

// The first of [low, high) whose value is at least `limit`; quick when it is near.
const firstFrom = (values, low, high, limit) => {
  let step = 1;
  while (low + step < high && values[low + step] < limit) step *= 2;
  let end = Math.min(low + step + 1, high);
  low += step >> 1;
  while (low < end) {
    const middle = (low + end) >> 1;
    if (values[middle] >= limit) end = middle; else low = middle + 1;
  }
  return low;
};

// Answers which of a stretch of values is the largest, from the largest of every 16 and of every 256.
class Largest {
  constructor(values) {
    this.values = values;
    this.blocks = [];
    for (let size = 16; size <= 256; size *= 16) {
      const block = new Uint32Array(Math.ceil(values.length / size));
      for (let b = 0; b < block.length; b++) block[b] = this.scan(b * size, Math.min((b + 1) * size, values.length));
      this.blocks.push(block);
    }
  }
  scan(from, to) {
    let best = from;
    for (let i = from + 1; i < to; i++) if (this.values[i] > this.values[best]) best = i;
    return best;
  }
  of(from, to) {
    if (to - from <= 32) return this.scan(from, to);
    const level = to - from > 512 ? 1 : 0, shift = level ? 8 : 4, blocks = this.blocks[level];
    const first = (from >> shift) + 1, last = to >> shift;
    let best = this.of(from, Math.min(first << shift, to));
    const take = i => { if (this.values[i] > this.values[best]) best = i; };
    for (let b = first; b < last; b++) take(blocks[b]);
    if (last << shift < to && last >= first) take(this.of(last << shift, to));
    return best;
  }
}

// The time that a lane is busy in [from, to).
const busyIn = (track, lane, from, to) => {
  const i = firstAbove(track.end, lane.from, lane.to, from);
  const j = firstFrom(track.start, i, lane.to, to);
  if (j <= i) return 0;
  return track.before[j] - track.before[i]
    - Math.max(0, from - track.start[i]) - Math.max(0, track.end[j - 1] - to);
};

// How many events of these tracks touch [from, to), their time within it, and the union of that time.
const measure = (tracks, from, to) => {
  let events = 0, sum = 0;
  const spans = [];
  for (const track of tracks) {
    for (const lane of track.lanes) {
      const i = firstAbove(track.end, lane.from, lane.to, from);
      const j = firstFrom(track.start, i, lane.to, to);
      for (let e = i; e < j; e++) {
        const start = Math.max(track.start[e], from), end = Math.min(track.end[e], to);
        spans.push(start, end);
        sum += end - start;
      }
      events += Math.max(0, j - i);
    }
  }
  const order = Uint32Array.from({ length: spans.length / 2 }, (_, i) => 2 * i).sort((a, b) => spans[a] - spans[b]);
  let busy = 0, until = from;
  for (const at of order) {
    if (spans[at + 1] <= until) continue;
    busy += spans[at + 1] - Math.max(spans[at], until);
    until = spans[at + 1];
  }
  return { events, sum, busy };
};
