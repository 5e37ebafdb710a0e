/* Compute a layout's costs: bytes of its cache, and seconds of its attention. */
function size(number) {
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(number) / 10)));
  return (number / 1024 ** unit).toFixed(unit ? 2 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
function duration(number) {
  const unit = [1, 1e-3, 1e-6].findIndex(least => number >= least), last = unit < 0 ? 3 : unit;
  return (number * 1000 ** last).toPrecision(3) + " " + ["s", "ms", "\u00b5s", "ns"][last];
}
function count(mask) { return mask.reduce((number, isGlobal) => number + isGlobal, 0); }
function bytes(cache, budget, total, context) {
  const native = cache.native || []; /* windows of heads that are local by design */
  const local = Math.max(0, total - budget - native.length) * Math.min(cache.window + (cache.sinks || 0), context);
  return cache.token * (budget * Math.min(context, cache.global || context) + local + native.reduce((sum, window) => sum + Math.min(window, context), 0));
}
/* Seconds per decoded token over all layers, interpolated between measurements; null beyond them. */
function seconds(times, cache, heads, mask, context) {
  const { contexts, counts, seconds: measured, window } = times;
  const between = (value, knots) => { /* [index below, fraction of the way to the next] */
    const next = Math.max(1, knots.findIndex(knot => knot >= value));
    return [next - 1, (value - knots[next - 1]) / (knots[next] - knots[next - 1])];
  };
  if (cache.native || cache.global < context || cache.window !== window || context < contexts[0] || context > contexts[contexts.length - 1])
    return null;
  const [row, rowFraction] = contexts.length > 1 ? between(context, contexts) : [0, 0];
  /* a sink token of a local head counts as that share of a global head's further keys */
  const further = context - cache.window, share = further > 0 ? Math.min(cache.sinks || 0, further) / further : 0;
  let sum = 0;
  for (let head = 0; head < mask.length; head += heads) {
    const number = count(mask.subarray(head, head + heads));
    const [column, columnFraction] = between(number + share * (heads - number), counts);
    const interpolated = row => measured[row][column] + columnFraction * (measured[row][column + 1] - measured[row][column]);
    sum += rowFraction ? interpolated(row) + rowFraction * (interpolated(row + 1) - interpolated(row)) : interpolated(row);
  }
  return sum;
}
