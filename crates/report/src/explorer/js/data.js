// Reads what encode.rs writes.
class Reader {
  constructor(bytes) { this.bytes = bytes; this.at = 0; }
  number() {
    const bytes = this.bytes;
    let byte = bytes[this.at++];
    if (byte < 128) return byte;
    // Beyond 31 bits shifting would overflow.
    let value = byte & 127, factor = 128;
    do { byte = bytes[this.at++]; value += (byte & 127) * factor; factor *= 128; } while (byte >= 128);
    return value;
  }
  numbers(into) { for (let i = 0; i < into.length; i++) into[i] = this.number(); return into; }
  // Stored plus one, so that 0 is nothing.
  optionals(into) { for (let i = 0; i < into.length; i++) into[i] = this.number() - 1; return into; }
  differences(into) {
    for (let i = 0, value = 0; i < into.length; i++) {
      const n = this.number();
      value += n % 2 ? -(n + 1) / 2 : n / 2;
      into[i] = value;
    }
    return into;
  }
  floats(into) {
    const view = new DataView(this.bytes.buffer, this.bytes.byteOffset);
    for (let i = 0; i < into.length; i++, this.at += 8) into[i] = view.getFloat64(this.at, true);
    return into;
  }
}

const readTrack = (reader, head, categories) => {
  const length = head.lanes.reduce((sum, lane) => sum + lane, 0);
  const track = { ...head, length, start: reader.differences(new Float64Array(length)) };
  if (head.kind === 'counter') {
    track.values = reader.floats(new Float64Array(length));
    track.largest = new Largest(track.values.map(value => Number.isFinite(value) ? value : -Infinity));
    track.top = 0;
    for (const value of track.values) if (value > track.top) track.top = value;
    return track;
  }
  const duration = reader.numbers(new Float64Array(length));
  track.end = new Float64Array(length);
  // The time of all events before each: the busy time between two events of a lane is one subtraction.
  track.before = new Float64Array(length + 1);
  for (let i = 0; i < length; i++) {
    track.end[i] = track.start[i] + duration[i];
    track.before[i + 1] = track.before[i] + duration[i];
  }
  track.names = reader.optionals(new Int32Array(length));
  track.category = head.categories ? reader.optionals(new Int32Array(length)) : null;
  track.detail = head.details ? reader.optionals(new Int32Array(length)) : null;
  track.correlation = head.correlations ? reader.differences(new Float64Array(length)) : null;
  track.link = head.links ? reader.differences(new Int32Array(length)).map(place => place - 1) : null;
  track.largest = new Largest(duration);
  let from = 0;
  track.lanes = head.lanes.map(lane => ({ from, to: from += lane, matches: null }));
  track.color = track.category || track.names.map(name => categories + (Math.max(name, 0) * 7) % 13);
  return track;
};

const readIterations = (reader, head) => {
  const list = { ...head, start: reader.differences(new Float64Array(head.count)) };
  list.wall = reader.numbers(new Float64Array(head.count));
  list.kind = reader.numbers(new Uint32Array(head.count));
  list.label = reader.numbers(new Uint32Array(head.count));
  list.part = head.parts.map(() => reader.optionals(new Float64Array(head.count)));
  list.fact = head.facts.map(() => reader.numbers(new Uint32Array(head.count)));
  return list;
};

const readSide = (reader, head, index) => {
  const side = { ...head, index };
  side.tracks = head.tracks.map(track => readTrack(reader, track, head.categories.length));
  side.iterations = readIterations(reader, head.iterations);
  side.firsts = [];
  let events = 0;
  for (const track of side.tracks) { side.firsts.push(events); events += track.length; }
  side.events = events;
  // The text of a string, and the place of an event that a link names.
  side.text = id => id < 0 ? '' : side.strings[id] ?? '';
  side.place = flat => {
    let track = side.tracks.length - 1;
    while (track > 0 && side.firsts[track] > flat) track--;
    return { side, track: side.tracks[track], index: flat - side.firsts[track] };
  };
  side.flat = place => side.firsts[side.tracks.indexOf(place.track)] + place.index;
  side.extent = extent(side);
  return side;
};

// What "all" shows: the ops and iterations where there are any. Samples and waiting threads often run far beyond.
const extent = side => {
  let low = Infinity, high = -Infinity;
  const add = (from, to) => { low = Math.min(low, from); high = Math.max(high, to); };
  const tracks = kind => side.tracks.filter(track => track.kind === kind && track.length);
  const { start, wall, count } = side.iterations;
  for (let i = 0; i < count; i++) add(start[i], start[i] + wall[i]);
  for (const kinds of [['ops'], ['calls', 'ranges'], ['counter']]) {
    for (const track of kinds.flatMap(tracks)) {
      const ends = track.end || track.start;
      for (let i = 0; i < track.length; i++) add(track.start[i], ends[i]);
    }
    if (high > low) break;
  }
  return high > low ? [low, high] : [0, 1000];
};

const load = async () => {
  const element = document.getElementById('data'), text = atob(element.textContent);
  element.remove();
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < packed.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const headLength = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headLength)));
  const reader = new Reader(bytes.subarray(4 + headLength));
  head.sides = head.sides.map((side, index) => readSide(reader, side, index));
  return head;
};
