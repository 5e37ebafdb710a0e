/* Compute the bytes of a layout's cache. */
function size(number) {
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(number) / 10)));
  return (number / 1024 ** unit).toFixed(unit ? 2 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
function count(mask) { return mask.reduce((number, isGlobal) => number + isGlobal, 0); }
function bytes(cache, budget, total, context) {
  const native = cache.native || []; /* windows of heads that are local by design */
  const local = Math.max(0, total - budget - native.length) * Math.min(cache.window + (cache.sinks || 0), context);
  return cache.token * (budget * Math.min(context, cache.global || context) + local + native.reduce((sum, window, head) => sum + Math.min(window, context) * (cache.sizes ? cache.sizes[head] : 1), 0));
}
