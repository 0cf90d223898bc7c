// The sum of `thinwire advise --parameters …` in the browser, for links without latency. Its constants are in
// calculator.json, which scripts/calculator_constants.py writes; a test compares the two.
"use strict";

// The parameters of a transformer of typical shapes, from the last to the first: [rows, columns], or [elements].
function standIn(parameters, constants) {
  const inBlocks = constants.blocks_share * parameters;
  const width = 64 * Math.max(1, Math.round(Math.pow((inBlocks / 12) * 64, 1 / 3) / 64));
  const ofBlock = 12 * width * width + 13 * width;
  const blocks = Math.trunc(inBlocks / ofBlock);
  const left = parameters - blocks * ofBlock;
  const block = [
    [width], [width], [width], [width], [width], [width, 4 * width], [4 * width], [4 * width, width],
    [width], [width, width], [3 * width], [3 * width, width],
  ];
  const shapes = Array(blocks).fill(block).flat();
  shapes.push([Math.trunc(left / width), width]);
  if (left % width) shapes.push([left % width]);
  return shapes;
}

const numel = (shape) => shape.reduce((product, size) => product * size, 1);
const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);

function inBuckets(shapes, constants) {
  const buckets = [];
  let bucket = [], bytes = 0;
  for (const shape of shapes) {
    bucket.push(shape);
    bytes += 4 * numel(shape);
    if (bytes >= constants.bucket_bytes[buckets.length ? 1 : 0]) {
      buckets.push(bucket);
      [bucket, bytes] = [[], 0];
    }
  }
  return bucket.length ? [...buckets, bucket] : buckets;
}

// Bytes that a process hands over in each round of a bucket.
function roundsOf(bucket, way, machines) {
  if (way.kind === "whole") return [way.element_bytes * sum(bucket.map(numel))];
  if (way.kind === "blocks") {
    const blocks = sum(bucket.map((shape) => Math.ceil(numel(shape) / way.block)));
    const filled = Math.ceil(blocks / machines) * machines;
    return [filled * way.block_bytes, (filled / machines) * way.block_bytes];
  }
  const before = 4 * sum(bucket.map(numel));
  let whole = 0, factors = 0;
  for (const shape of bucket) {
    const rank = Math.min(way.matrix_rank, ...shape);
    const bytes = Math.trunc(rank * sum(shape) * 4 * way.factor_pairs);
    if (shape.length === 2 && numel(shape) && bytes * 2 < 4 * numel(shape)) factors += bytes;
    else whole += 4 * numel(shape);
  }
  if (!factors || whole + factors >= before) return [before];
  return way.factor_pairs < 1 ? [whole + factors] : [whole + factors / 2, factors / 2];
}

// Messages as [when sent, bytes, when waited for, which of its bucket], in the order in which they are sent.
function messagesOf(rounds, ready, inTurn, machines, moment) {
  const messages = [];
  if (inTurn && machines === 2) {
    const waited = ready[ready.length - 1] + moment;
    rounds.forEach((bytes, index) => {
      bytes.forEach((part, which) => messages.push([ready[index], part, waited, which]));
    });
    return messages;
  }
  if (inTurn) {
    const end = ready[ready.length - 1] + 3 * moment;
    const waits = [...ready.slice(1).map((seconds) => seconds + moment), end, end, end + 2 * moment];
    rounds.forEach((bytes, index) => {
      messages.push([ready[index], bytes[0], waits[index], 0]);
      messages.push([waits[index] + moment, bytes[1], waits[index + 2], 1]);
    });
    return messages.sort((one, other) => one[0] - other[0]);
  }
  const end = ready[ready.length - 1] + moment;
  rounds.forEach((bytes, index) => messages.push([ready[index], bytes[0], end, 0]));
  const later = sum(rounds.map((bytes) => bytes[1] ?? 0));
  if (later) messages.push([end + 2 * moment, later, end + 3 * moment, 1]);
  return messages;
}

function planned(buckets, way, facts, constants) {
  const { computeSeconds, bytesPerSecond, machines } = facts;
  const total = sum(buckets.flat().map(numel));
  const arithmetic = total * way.arithmetic_seconds;
  const backward = (1 - constants.forward_share) * computeSeconds + arithmetic / 2;
  let done = 0;
  const ready = buckets.map((bucket) => {
    done += sum(bucket.map(numel));
    return constants.forward_share * computeSeconds + (backward * done) / total;
  });
  const rounds = buckets.map((bucket) => roundsOf(bucket, way, machines));
  const messages = messagesOf(rounds, ready, way.kind === "blocks", machines, constants.moment);
  const wire = messages.map(([, bytes, , which]) => {
    if (way.kind !== "blocks") return Math.floor((2 * bytes * (machines - 1)) / machines);
    return which === 0 ? Math.floor((bytes * (machines - 1)) / machines) : bytes * (machines - 1);
  });
  const events = messages.flatMap(([at, , waited], index) => [[at, 0, index], [waited, 1, index]]);
  events.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
  let delay = 0, busyUntil = 0;
  const arrivals = [];
  for (const [seconds, isWait, index] of events) {
    if (isWait) delay = Math.max(delay, arrivals[index] - seconds);
    else arrivals[index] = busyUntil = Math.max(busyUntil, seconds + delay) + wire[index] / bytesPerSecond;
  }
  return { stepSeconds: computeSeconds + arithmetic + delay, sentBytes: sum(wire) };
}

function nearestGap(name, asked, constants) {
  const isShort = (gap) => asked.steps === null || gap.steps <= asked.steps;
  const distance = (gap) =>
    sum(
      [
        asked.parameters / gap.parameters,
        asked.machines / gap.members,
        asked.steps === null ? 1 : asked.steps / gap.steps,
      ].map((ratio) => Math.abs(Math.log(ratio))),
    );
  const nearest = {};
  for (const optimizer of constants.optimizers) {
    let all = constants.gaps.filter((gap) => gap.name === name && gap.optimizer === optimizer);
    // What low rank lost in a small model tells nothing of a far larger one, but with SGD.
    if (name.startsWith(constants.low_rank) && asked.optimizer !== "SGD")
      all = all.filter((gap) => asked.parameters <= constants.max_times_larger * gap.parameters);
    const alike = all.filter((gap) => !gap.is_recurrent);
    const gaps = alike.length ? alike : all;
    if (!gaps.length) continue;
    const most = Math.max(Math.min(...gaps.map((gap) => gap.steps)), asked.steps ?? 0);
    const short = gaps.filter((gap) => gap.steps <= most);
    short.sort((one, other) => distance(one) - distance(other) || other.seeds - one.seeds);
    nearest[optimizer] = short[0];
  }
  if (constants.optimizers.includes(asked.optimizer)) return nearest[asked.optimizer];
  const worst = Object.values(nearest);
  return worst.sort((one, other) => isShort(one) - isShort(other) || other.percent - one.percent)[0];
}

// The loss to count with, in percent; null if it is not known.
function lossOf(way, asked, constants) {
  if (way.name === constants.exact) return 0;
  const training = way.keeps_16_bits ? { ...asked, steps: null } : asked;
  const counts = (gap) => gap && (training.steps === null || gap.steps <= training.steps);
  const own = nearestGap(way.measured_as, training, constants);
  if (counts(own)) return own.percent;
  const less = nearestGap(way.loses_more_than, training, constants);
  const more = nearestGap(way.loses_less_than, training, constants);
  return less && counts(more) ? more.percent : null;
}

const orderOf = (way, constants) =>
  way.loss === null ? Infinity : way.loss > constants.noise_percent ? way.loss : 0;

function tied(ways, constants) {
  const ranked = [...ways].sort((one, other) => one.stepSeconds - other.stepSeconds);
  const fastest = ranked[0].stepSeconds;
  return ranked.filter((way) => fastest >= (1 - constants.least_gain) * way.stepSeconds);
}

// By the rule of `thinwire.advise`.
function choose(ways, facts, constants) {
  const exact = ways.find((way) => way.name === constants.exact);
  if (facts.computeSeconds > (1 - constants.least_gain) * exact.stepSeconds) return exact;
  const careful = tied(ways.filter((way) => way.keeps_16_bits), constants);
  const rough = ways.filter(
    (way) =>
      !way.keeps_16_bits &&
      way.stepSeconds < (1 - constants.least_gain) * careful[0].stepSeconds &&
      orderOf(way, constants) <= constants.budget_percent,
  );
  const rank = (way) => [
    way.keeps_16_bits ? 0 : orderOf(way, constants), way.name === constants.exact ? 0 : 1, -way.sentBytes,
  ];
  return (rough.length ? tied(rough, constants) : careful).sort((one, other) => {
    const differences = rank(one).map((value, index) => value - rank(other)[index]);
    return differences.find((difference) => difference !== 0) ?? 0;
  })[0];
}

// Facts: parameters, computeSeconds, bytesPerSecond, machines, optimizer (or null), steps (or null).
function answer(facts, constants) {
  const buckets = inBuckets(standIn(facts.parameters, constants), constants);
  const ways = constants.ways.map((way) => ({
    ...way,
    ...planned(buckets, way, facts, constants),
    loss: lossOf(way, facts, constants),
  }));
  ways.sort((one, other) => one.stepSeconds - other.stepSeconds);
  return { ways, best: choose(ways, facts, constants).name };
}

if (typeof module !== "undefined") module.exports = { answer };
