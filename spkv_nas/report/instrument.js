/* The instrument: heads chosen by hand on the first map. What varies is in `state`; `draw` shows it. */
/* The first 8 hexadecimal digits of SHA-256 (FIPS 180-4), at once: crypto.subtle answers later, and not on every page. */
const primes = [], isPrime = number => primes.every(prime => number % prime);
for (let number = 2; primes.length < 64; number++) if (isPrime(number)) primes.push(number);
const fraction = root => Math.floor(root % 1 * 2 ** 32);
const ROUNDS = primes.map(prime => fraction(Math.cbrt(prime))), START = primes.slice(0, 8).map(prime => fraction(Math.sqrt(prime)));
function shortHash(text) {
  const bytes = [...new TextEncoder().encode(text), 128], length = 8 * (bytes.length - 1);
  while (bytes.length % 64 !== 56) bytes.push(0);
  for (let shift = 56; shift >= 0; shift -= 8) bytes.push(Math.floor(length / 2 ** shift) & 255);
  const turn = (word, by) => word >>> by | word << 32 - by, words = new Int32Array(64), state = Int32Array.from(START);
  for (let block = 0; block < bytes.length; block += 64) {
    for (let i = 0; i < 16; i++) {
      const at = block + 4 * i;
      words[i] = bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3];
    }
    for (let i = 16; i < 64; i++) {
      const early = words[i - 15], late = words[i - 2];
      words[i] = words[i - 16] + (turn(early, 7) ^ turn(early, 18) ^ early >>> 3) + words[i - 7] + (turn(late, 17) ^ turn(late, 19) ^ late >>> 10);
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + (e & f ^ ~e & g) + ROUNDS[i] + words[i] | 0;
      const two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + (a & b ^ a & c ^ b & c) | 0;
      h = g; g = f; f = e; e = d + one | 0; d = c; c = b; b = a; a = one + two | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { state[i] += word; });
  }
  return (state[0] >>> 0).toString(16).padStart(8, "0");
}

/* YAML as PyYAML writes it: text that would read as a number has quotes, a share has a point. */
function yamlText(digits) { return /^(0b[01]+|0[0-7]+|[1-9]\d*|\d+e\d+)$/.test(digits) ? "'" + digits + "'" : digits; }
function yamlShare(share) { return Number.isInteger(share) ? share + ".0" : String(share); }

function instrument(given) {
  const element = name => document.getElementById("instrument-" + name);
  const map = document.querySelector("svg[data-chart=density]"), [layers, heads] = given.grid, total = layers * heads;
  const headOf = Array.from({ length: total }, (_, cell) => cell % layers * heads + Math.floor(cell / layers));
  const picture = live(map, given, heads), cells = activate(map, heads);
  const layouts = given.layouts.map(([name, text]) => ({ name, mask: new Code(text).flags(total) }));
  const state = { signal: 0, domain: 0, tau: given.signals[0].start, budget: given.budget, limit: "", context: 131072, other: -1 };
  const decoded = given.signals.map(signal => decode(signal, total)), tables = new Map();
  const none = new Uint8Array(total);
  let painted = "", before = none, otherBefore = none;

  function table() {
    const key = state.signal + "," + state.tau;
    if (!tables.has(key)) {
      const unit = 2 * 10 ** given.signals[state.signal].decimals, { levels, order, covered } = decoded[state.signal][state.tau];
      tables.set(key, { values: levels.map(one => one.map(level => (level + 0.5) / unit)), order, covered });
    }
    return tables.get(key);
  }
  function chosen() {
    const mask = new Uint8Array(total), { order } = table();
    for (let rank = 0; rank < state.budget; rank++) mask[order[rank]] = 1;
    return mask;
  }
  function bytes(cache, budget) {
    return cache.token * (budget * state.context + (total - budget) * Math.min(cache.window, state.context));
  }
  function size(number) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (number >= 1024 && at < 4) { number /= 1024; at++; }
    return number.toFixed(at ? 2 : 0) + " " + units[at];
  }
  /* Seconds per token of all layers when decoding: as measured, between what was measured, or the bound. */
  function seconds(signal, mask) {
    const { contexts, counts, seconds: measured, window, bandwidth } = given.times, { cache } = signal;
    const between = (at, places) => { /* [place below, share of the way to the next] */
      const above = Math.max(1, places.findIndex(place => place >= at));
      return [above - 1, (at - places[above - 1]) / (places[above] - places[above - 1])];
    };
    if (!measured || cache.window !== window || state.context < contexts[0] || state.context > contexts[contexts.length - 1])
      return [bytes(cache, distance(mask, none)) / bandwidth, "at least, when decoding (" + given.times.bound + ")"];
    const [row, down] = contexts.length > 1 ? between(state.context, contexts) : [0, 0];
    let sum = 0;
    for (let layer = 0; layer < layers; layer++) {
      const [column, right] = between(mask.subarray(layer * heads, (layer + 1) * heads).reduce((number, one) => number + one, 0), counts);
      const at = row => measured[row][column] + right * (measured[row][column + 1] - measured[row][column]);
      sum += down ? at(row) + down * (at(row + 1) - at(row)) : at(row);
    }
    return [sum, "when decoding (" + given.times.measured + ")"];
  }
  function duration(number) {
    const units = ["s", "ms", "\u00b5s", "ns"];
    let at = 0;
    while (number < 1 && at < 3) { number *= 1000; at++; }
    return number.toPrecision(3) + " " + units[at];
  }
  function predicted(signal) { /* [mean, deviation] in percent, by threshold, of the budgets that were scored */
    const { low, count, order, code } = signal.predicted, reader = new Code(code), orders = new Array(count).fill(order);
    const pairs = signal.taus.map(() => [reader.run(orders).numbers, reader.run(orders).numbers]);
    return (tau, budget) => budget < low || budget >= low + count ? null : pairs[tau].map(numbers => numbers[budget - low] / 1000);
  }
  const predictions = given.signals.map(signal => signal.predicted ? predicted(signal) : () => null);
  function percent(number) { return (number < 0 ? "\u2212" : "+") + Math.abs(number).toFixed(2) + " %"; }
  function drawCosts(signal, mask) {
    const { cache } = signal, found = predictions[state.signal](state.tau, state.budget);
    element("memory-row").hidden = element("limit-row").hidden = element("time-row").hidden = !cache;
    if (cache) {
      element("memory").textContent = size(bytes(cache, state.budget)) + " of " + size(bytes(cache, total));
      const [own, from] = seconds(signal, mask), [most] = seconds(signal, mask.map(() => 1));
      element("time").textContent = duration(own) + " of " + duration(most);
      element("time-from").textContent = from;
      if (element("limit").value !== state.limit) element("limit").value = state.limit;
    }
    element("predicted-row").hidden = !found;
    if (!found) return;
    const [mean, deviation] = found;
    element("predicted").textContent = percent(mean);
    element("predicted-by").textContent = "before retraining, 95 % interval " + percent(mean - 1.96 * deviation) + " to " +
      percent(mean + 1.96 * deviation) + ", by what the search scored";
  }
  function file(mask) {
    const signal = given.signals[state.signal], { before, between, window, strategy, origin } = signal.file;
    const rows = Array.from({ length: layers }, (_, layer) =>
      Array.from(mask.subarray(layer * heads, (layer + 1) * heads), one => one ? "G" : "L").join(""));
    const varying = {
      budget: String(state.budget), coverage: yamlShare(table().covered[state.budget - 1]), tau: signal.taus[state.tau],
    };
    const entries = origin.map(([key, entry]) => entry || key + ": " + varying[key]).join(", ");
    const hash = shortHash(window + "\n" + rows.join("/")), check = shortHash("{" + strategy + ", provenance: {" + entries + "}}");
    const text = before + rows.map(row => "  - " + row).join("\n") + between +
      "{" + entries + ", hash: " + yamlText(hash) + ", check: " + yamlText(check) + "}\n";
    return { text, hash };
  }
  function distance(one, other) {
    let number = 0;
    for (let head = 0; head < total; head++) number += one[head] ^ other[head];
    return number;
  }
  function drawMeasured(mask) {
    const away = layouts.map(layout => distance(mask, layout.mask));
    given.measured.forEach(([, results], row) => { /* the best comes first */
      let best = results[0];
      for (const result of results) if (away[result[0]] < away[best[0]]) best = result;
      const [at, delta, error] = best, cells = element("measured").rows[row].cells;
      const sign = delta < 0 ? "\u2212" : "+";
      cells[1].firstChild.textContent = layouts[at].name;
      cells[1].firstChild.dataset.layout = at;
      cells[2].textContent = away[at];
      cells[3].textContent = sign + Math.abs(delta).toFixed(3) + " \u00b1 " + (error === null ? "\u2014" : error.toFixed(3));
    });
  }
  function drawDomains(signal, values, mask) { /* to a percent: values are known to a thousandth or so */
    const covered = values.slice(1).map(one => {
      const kept = one.map(value => value < 1 / 10 ** signal.decimals / 2 ? 0 : value);
      const sum = kept.reduce((before, value) => before + value, 0);
      return sum ? 100 * kept.reduce((before, value, head) => before + mask[head] * value, 0) / sum : NaN;
    });
    const named = covered.map((share, domain) => [share, domain]).filter(([share]) => !Number.isNaN(share)).sort((one, other) => one[0] - other[0]);
    const say = ([share, domain]) => "about " + share.toFixed(0) + " % in " + signal.domains[domain];
    const picked = named.find(([, domain]) => domain === state.domain - 1);
    element("by-domain").textContent = picked ? say(picked) : named.length > 1 ? say(named[0]) + ", " + say(named[named.length - 1]) : "";
  }
  function draw() {
    const signal = given.signals[state.signal], { values, covered } = table(), shown = values[state.domain] || values[0];
    const key = [state.signal, state.tau, state.domain].join();
    if (painted !== key) picture.paint(signal.scale, headOf.map(head => shown[head]));
    painted = key;
    const mask = chosen(), other = state.other < 0 ? none : layouts[state.other].mask;
    picture.outline(headOf.map(head => mask[head]), headOf.map(head => other[head]));
    before = mask;
    otherBefore = other;
    map.closest("section").querySelector("h2").textContent = signal.noun[0].toUpperCase() + signal.noun.slice(1) + " by layer and KV head";
    element("scale").hidden = element("about").hidden = state.signal > 0; /* these are of the first */
    element("shades").textContent = state.signal ? "Numbers: " + signal.noun + ", " + signal.shown + "; the higher, the lighter." : "";
    element("budget").value = state.budget;
    element("heads").textContent = state.budget + " of " + total + " KV heads";
    element("tau-row").hidden = signal.taus.length < 2;
    element("tau").max = signal.taus.length - 1;
    element("tau").value = state.tau;
    element("tau").setAttribute("aria-valuetext", signal.taus[state.tau]);
    element("tau-value").textContent = signal.taus[state.tau] + (state.tau === signal.own ? ", the probe's" : ", by histogram");
    if (element("at")) element("at").textContent = signal.taus[state.tau];
    element("coverage").textContent = (100 * covered[state.budget - 1]).toFixed(2) + " %";
    drawDomains(signal, values, mask);
    drawCosts(signal, mask);
    const { text, hash } = file(mask);
    element("hash").textContent = hash;
    element("download").href = "data:text/yaml;charset=utf-8," + encodeURIComponent(text);
    element("download").download = "densest-" + state.budget + ".yaml";
    element("command").replaceChildren(...command(signal).split(" ").flatMap((word, at) => {
      const span = document.createElement("span");
      span.textContent = word;
      return at ? [" ", span] : [span];
    }));
    const both = mask.reduce((number, one, head) => number + (one & other[head]), 0);
    element("difference").textContent = state.other < 0 ? "" :
      "both " + both + " \u00b7 only here " + (distance(mask, none) - both) + " \u00b7 only in " + layouts[state.other].name + " " + (distance(other, none) - both);
    drawMeasured(mask);
    clearTimeout(waiting);
    waiting = setTimeout(settle, 400);
  }

  function command(signal) {
    const tau = state.tau === signal.own ? "" : " --tau " + signal.taus[state.tau];
    return "spkv-nas propose --probe " + signal.quoted + " --budget " + state.budget + tau;
  }
  function fill(select, names, chosen) {
    select.replaceChildren(...names.map(([value, name]) => new Option(name, value, false, value === chosen)));
  }
  function fillDomains() {
    const { domains } = given.signals[state.signal];
    fill(element("domain"), [[0, "all text"], ...domains.map((name, number) => [number + 1, name])], state.domain);
    element("domain-row").hidden = domains.length < 2;
  }
  function fillOthers() {
    const offered = layouts.map(({ name }, at) => [at, name]).filter(([at]) => at < given.offered || at === state.other);
    fill(element("other"), [[-1, "nothing"], ...offered], state.other);
  }

  function label(index) {
    const signal = given.signals[state.signal], { values } = table(), head = headOf[index];
    const exact = one => minus(one[head].toFixed(signal.decimals));
    const own = before[head] ? "global" : "local", other = otherBefore[head] ? "global" : "local";
    const way = state.other < 0 ? own : own + ", in " + layouts[state.other].name + " " + other;
    return [place(index, layers) + ": " + signal.noun + " " + exact(values[0]) + signal.unit + ", " + way,
      ...values.slice(1).map((one, domain) => signal.domains[domain] + ": " + exact(one))].join("\n");
  }
  let waiting = 0, applied = "", touched = false;
  /* What need not follow every step: labels, and the address, which browsers let a page change only so often. */
  function settle() {
    cells.forEach((cell, index) => cell.setAttribute("aria-label", label(index)));
    if (!touched) return;
    const signal = given.signals[state.signal];
    const parts = { signal: signal.name, tau: signal.taus[state.tau], budget: state.budget, context: state.context };
    if (state.domain) parts.domain = signal.domains[state.domain - 1];
    if (state.other >= 0) parts.with = layouts[state.other].name;
    applied = "#" + new URLSearchParams(parts);
    if (location.hash !== applied) history.replaceState(null, "", applied);
  }
  function whole(text, low, high, otherwise) {
    return /^\d+$/.test(text || "") ? Math.min(high, Math.max(low, Number(text))) : otherwise;
  }
  function restore() {
    const parts = new URLSearchParams(location.hash.slice(1));
    if (location.hash === applied || !parts.has("budget")) return false;
    const find = (names, name, otherwise) => names.includes(name) ? names.indexOf(name) : otherwise;
    state.signal = find(given.signals.map(signal => signal.name), parts.get("signal"), 0);
    const signal = given.signals[state.signal];
    state.tau = find(signal.taus, parts.get("tau"), signal.start);
    state.budget = whole(parts.get("budget"), 1, total, given.budget);
    state.context = whole(parts.get("context"), 1, 2 ** 40, state.context);
    state.domain = signal.domains.length > 1 ? find(signal.domains, parts.get("domain"), -1) + 1 : 0;
    state.other = find(layouts.map(({ name }) => name), parts.get("with"), -1);
    return true;
  }
  function begin() {
    fill(element("signal"), given.signals.map(({ name, noun }, number) => [number, name + ": " + noun]), state.signal);
    element("signal-row").hidden = given.signals.length < 2;
    element("context").value = state.context;
    fillDomains();
    fillOthers();
    draw();
  }
  function fit() { /* as many global heads as the memory holds, one at least */
    const { cache } = given.signals[state.signal];
    if (!cache || !Number(state.limit)) return;
    const local = bytes(cache, 0), each = (bytes(cache, total) - local) / total;
    const most = each ? Math.floor((Number(state.limit) * 2 ** 20 - local) / each) : total;
    state.budget = Math.min(total, Math.max(1, most));
  }
  function listen(name, change) {
    element(name).addEventListener("input", event => { touched = true; change(event.target.value); draw(); });
  }
  element("budget").max = total;
  listen("budget", value => { state.budget = Number(value); state.limit = ""; });
  listen("tau", value => { state.tau = Number(value); });
  listen("domain", value => { state.domain = Number(value); });
  listen("other", value => { state.other = Number(value); });
  listen("context", value => { state.context = whole(value, 1, 2 ** 40, state.context); fit(); });
  listen("signal", value => {
    state.signal = Number(value);
    state.tau = given.signals[state.signal].start;
    state.domain = 0;
    fillDomains();
    fit();
  });
  listen("limit", value => { state.limit = value; fit(); });
  if (given.measured.length) element("measured").addEventListener("click", event => {
    if (!event.target.dataset.layout) return;
    touched = true;
    state.other = Number(event.target.dataset.layout);
    fillOthers();
    draw();
  });
  element("copy").addEventListener("click", async () => {
    const code = element("command");
    try {
      await navigator.clipboard.writeText(code.textContent);
      element("said").textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      element("said").textContent = "selected: copy it with the keyboard";
    }
  });
  addEventListener("hashchange", () => { if (restore()) begin(); });
  restore();
  begin();
  cells.forEach((cell, index) => cell.setAttribute("aria-label", label(index)));
  for (const part of document.querySelectorAll("[data-instrument]")) part.hidden = false;
}
if (data.instrument) instrument(data.instrument);
