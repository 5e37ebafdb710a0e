/* The layout explorer: choose heads on the first map. All settings are in `state`; `draw` shows them. */
function startExplorer(explorer) {
  const element = name => document.getElementById("explorer-" + name);
  const map = document.querySelector("svg[data-chart=density]"), [layers, heads] = explorer.grid, total = layers * heads, absent = new Set(explorer.absent);
  const headOf = Array.from({ length: total }, (_, cell) => cell % layers * heads + Math.floor(cell / layers));
  const pictures = [...element("pair").children].map(figure => smallMap(figure, layers, heads, absent));
  const picture = live(map, explorer, heads), cells = activate(map, heads);
  headOf.forEach((head, cell) => { if (absent.has(head)) cells[cell].remove(); }); /* beyond the heads of its layer */
  const layouts = explorer.layouts.map(([name, text]) => ({ name, mask: unpackBits(text, total) }));
  const state = { signal: 0, domain: 0, tau: explorer.signals[0].start, budget: explorer.budget, limit: "", context: explorer.context, selected: explorer.start, compared: -1 };
  const tables = new Map(), allLocal = new Uint8Array(total), fixed = new Set(explorer.fixed);
  const isCandidate = allLocal.map((_, head) => absent.has(head) || fixed.has(Math.floor(head / heads)) ? 0 : 1), candidates = count(isCandidate);
  let paintedKey = "", selectedHeads = allLocal, comparison = null;
  if (state.selected >= 0) state.budget = count(effective(layouts[state.selected].mask));

  function effective(mask) { return mask.map((isGlobal, head) => isGlobal & isCandidate[head]); } /* without heads that are local by design */
  function table(signal = state.signal, tau = state.tau) {
    const key = signal + "," + tau;
    if (!tables.has(key)) {
      const { decimals, levels, order, coverage } = explorer.signals[signal], unit = 2 * 10 ** decimals;
      let covered = 0;
      tables.set(key, {
        values: levels.map(part => part.map(byTau => byTau[tau] === null ? NaN : (byTau[tau] + 0.5) / unit)),
        order: order[tau],
        covered: coverage[tau].map(added => (covered += added) / 10000),
      });
    }
    return tables.get(key);
  }
  function topHeads(order) {
    const mask = new Uint8Array(total);
    for (let rank = 0; rank < state.budget; rank++) mask[order[rank]] = 1;
    return mask;
  }
  function selectedMask() { return state.selected < 0 ? topHeads(table().order) : layouts[state.selected].mask; }
  function comparedLayout() { /* the layout to compare with; -2 and below: as many heads by another probe at its own threshold */
    if (state.compared >= 0) return layouts[state.compared];
    const probe = -2 - state.compared;
    return probe < 0 ? null : { name: "heads selected by " + explorer.signals[probe].name, mask: topHeads(explorer.signals[probe].order[explorer.signals[probe].probe_tau]) };
  }
  function memory(cache, budget) { return bytes(cache, budget, total - absent.size, state.context); }
  function drawCosts(signal) {
    const { cache } = signal;
    element("memory-row").hidden = element("limit-row").hidden = !cache;
    if (cache) element("memory").textContent = size(memory(cache, state.budget)) + " of " + size(memory(cache, candidates));
    if (element("limit").value !== state.limit) element("limit").value = state.limit;
  }
  function file(mask) {
    const stored = explorer.files[state.selected], text = rowsOf(mask).map(row => "  - " + row).join("\n");
    if (stored) return stored.length ? { name: stored[0], text: stored[3] + text + stored[4], hash: stored[2] } : null;
    if (state.selected >= 0) return null;
    const signal = explorer.signals[state.signal], { before, between, window, sinks, origin } = signal.file;
    const rows = rowsOf(mask);
    const varying = {
      budget: String(state.budget), coverage: yamlShare(table().covered[state.budget - 1]), tau: signal.taus[state.tau],
    };
    const entries = origin.map(([key, entry]) => entry || key + ": " + varying[key]).join(", ");
    const content = window + "\n" + rows.join("/") + (sinks ? "\nsinks " + sinks : "");
    const hash = shortHash(content), check = shortHash("{" + entries + "}");
    const provenance = "{" + entries + ", hash: " + yamlText(hash) + ", check: " + yamlText(check) + "}\n";
    return { name: "densest-" + state.budget, text: before + text + between + provenance, hash };
  }
  function rowsOf(mask) {
    return Array.from({ length: layers }, (_, layer) =>
      Array.from(mask.subarray(layer * heads, (layer + 1) * heads), (isGlobal, head) => absent.has(layer * heads + head) ? "" : isGlobal ? "G" : "L").join(""));
  }
  function distance(mask, otherMask) {
    let number = 0;
    for (let head = 0; head < total; head++) number += (mask[head] ^ otherMask[head]) & isCandidate[head];
    return number;
  }
  function drawMeasured(mask) {
    const distances = layouts.map(layout => distance(mask, layout.mask));
    explorer.measured.forEach(([, , results], row) => { /* the lowest NLL comes first */
      let best = results[0];
      for (const result of results) if (distances[result[0]] < distances[best[0]]) best = result;
      const [index, change, error] = best, cells = element("measured").rows[row].cells;
      cells[1].textContent = delta(change, error);
      cells[2].firstChild.textContent = layouts[index].name;
      cells[2].firstChild.dataset.layout = index;
      cells[3].textContent = distances[index];
    });
  }
  function coverageOf(values, mask, signal) {
    const smallest = 1 / 10 ** signal.decimals / 2;
    let sum = 0, total = 0;
    values.forEach((value, head) => {
      if (!(value >= smallest)) return;
      total += value;
      sum += mask[head] * value;
    });
    return total ? sum / total : NaN;
  }
  function drawDomains(signal, values, mask) { /* rounded to a percent, because the levels are not exact */
    const covered = values.slice(1).map(domainValues => 100 * coverageOf(domainValues, mask, signal));
    const shares = covered.map((share, domain) => [share, domain]).filter(([share]) => !Number.isNaN(share)).sort((first, second) => first[0] - second[0]);
    const phrase = ([share, domain]) => "about " + share.toFixed(0) + "\u00a0% in " + signal.domains[domain];
    const selected = shares.find(([, domain]) => domain === state.domain - 1);
    element("by-domain").textContent = selected ? phrase(selected) : shares.length > 1 ? phrase(shares[0]) + ", " + phrase(shares[shares.length - 1]) : "";
  }
  function draw() {
    const signal = explorer.signals[state.signal], { values, covered } = table(), shownValues = values[state.domain] || values[0];
    const key = [state.signal, state.tau, state.domain].join();
    if (paintedKey !== key) picture.paint(signal.scale, headOf.map(head => shownValues[head]));
    paintedKey = key;
    const mask = selectedMask(), other = comparedLayout();
    picture.outline(headOf.map(head => mask[head]), headOf.map(head => other && !mask[head] ? other.mask[head] : 0));
    selectedHeads = mask;
    comparison = other;
    map.closest("section").querySelector("h2").textContent = signal.noun[0].toUpperCase() + signal.noun.slice(1) + " by layer and KV head";
    element("scale").hidden = element("about").hidden = state.signal > 0; /* both describe the first probe */
    element("scale-note").textContent = state.signal ? "Numbers: " + signal.noun + ", " + signal.shown + "; lighter is higher." : "";
    element("budget").value = state.budget;
    element("heads").textContent = state.budget + " of " + candidates + " KV heads" + (fixed.size ? " that can be global" : "");
    element("tau-row").hidden = signal.taus.length < 2;
    element("tau").max = signal.taus.length - 1;
    element("tau").value = state.tau;
    element("tau").setAttribute("aria-valuetext", signal.taus[state.tau]);
    element("tau-value").textContent = signal.taus[state.tau] + (state.tau === signal.probe_tau ? " (the probe's)" : " (interpolated)");
    if (element("table-tau")) element("table-tau").textContent = signal.taus[state.tau];
    element("selected").value = state.selected;
    const stored = explorer.files[state.selected] || [], isStart = !state.signal && state.tau === signal.start;
    element("coverage").textContent = state.selected < 0 ? (100 * covered[state.budget - 1]).toFixed(2) + " %" :
      isStart && stored.length ? stored[1] + " %" : "about " + (100 * coverageOf(values[0], mask, signal)).toFixed(1) + " %";
    drawDomains(signal, values, mask);
    drawCosts(signal);
    drawFile(signal, file(mask));
    drawPair(mask, other);
    drawMeasured(mask);
    clearTimeout(settleTimer);
    settleTimer = setTimeout(settle, 400);
  }
  function drawFile(signal, download) { /* the file of the selected layout, and the command that produces it */
    const next = state.selected === explorer.start ? document.getElementById("next-1") : null;
    element("layout-row").hidden = !download;
    element("command-row").hidden = state.selected >= 0 && !next;
    if (download) {
      element("hash").textContent = download.hash;
      element("download").href = "data:text/yaml;charset=utf-8," + encodeURIComponent(download.text);
      element("download").download = download.name + ".yaml";
    }
    element("command").replaceChildren(...(state.selected < 0 ? command(signal) : next ? next.textContent : "").split(" ").flatMap((word, position) => [position ? " " : "", tag("span", {}, word)]));
  }
  function drawPair(mask, other) {
    element("pair").hidden = !other;
    element("difference").textContent = "";
    if (!other) return;
    const both = mask.reduce((number, isGlobal, head) => number + (isGlobal & other.mask[head]), 0), name = selectedName();
    element("difference").textContent = "both " + both + " \u00b7 only here " + (count(mask) - both) + " \u00b7 only in " + other.name + " " + (count(other.mask) - both);
    pictures[0](name, mask, other.mask);
    pictures[1](other.name, other.mask, mask);
  }
  function selectedName() { return state.selected < 0 ? "From sliders" : layouts[state.selected].name; }

  function command(signal) {
    const tau = state.tau === signal.probe_tau ? "" : " --tau " + signal.taus[state.tau];
    return signal.command + " --budget " + state.budget + tau;
  }
  function fill(select, names, chosen) {
    select.replaceChildren(...names.map(([value, name]) => new Option(name, value, false, value === chosen)));
  }
  function fillDomains() {
    const { domains } = explorer.signals[state.signal];
    fill(element("domain"), [[0, "all text"], ...domains.map((name, number) => [number + 1, name])], state.domain);
    element("domain-row").hidden = domains.length < 2;
  }
  function fillLayouts() {
    const offered = layouts.map(({ name }, index) => [index, name]).filter(([index]) => index < explorer.offered || index === state.compared || index === state.selected);
    const probes = explorer.signals.map(({ name }, probe) => [-2 - probe, "as many heads selected by " + name]).filter((_, probe) => probe !== state.signal);
    fill(element("selected"), [[-1, "from sliders"], ...offered], state.selected);
    fill(element("compared"), [[-1, "nothing"], ...probes, ...offered], state.compared);
  }

  function label(index) {
    const signal = explorer.signals[state.signal], { values } = table(), head = headOf[index];
    const exact = numbers => minus(numbers[head].toFixed(signal.decimals));
    const kind = !isCandidate[head] ? "local by design" : selectedHeads[head] ? "global" : "local";
    const status = comparison && isCandidate[head] ? kind + ", in " + comparison.name + " " + (comparison.mask[head] ? "global" : "local") : kind;
    return [headLabel(index, layers) + ": " + signal.noun + " " + exact(values[0]) + signal.unit + ", " + status,
      ...values.slice(1).map((domainValues, domain) => signal.domains[domain] + ": " + exact(domainValues))].join("\n");
  }
  let settleTimer = 0, appliedHash = "", hasChanged = false;
  /* Update, once the reader pauses, the labels and the address, which browsers let a page change only so often. */
  function settle() {
    cells.forEach((cell, index) => cell.setAttribute("aria-label", label(index)));
    if (!hasChanged) return;
    const signal = explorer.signals[state.signal];
    const parts = { signal: signal.name, tau: signal.taus[state.tau], budget: state.budget, context: state.context };
    if (state.domain) parts.domain = signal.domains[state.domain - 1];
    if (state.selected >= 0) parts.layout = layouts[state.selected].name;
    if (state.compared >= 0) parts.with = layouts[state.compared].name;
    if (state.compared < -1) parts.against = explorer.signals[-2 - state.compared].name;
    appliedHash = "#" + new URLSearchParams(parts);
    if (location.hash !== appliedHash) history.replaceState(null, "", appliedHash);
  }
  function parseWhole(text, low, high, otherwise) {
    return /^\d+$/.test(text || "") ? Math.min(high, Math.max(low, Number(text))) : otherwise;
  }
  function restore() {
    const parts = new URLSearchParams(location.hash.slice(1));
    if (location.hash === appliedHash || !parts.has("budget")) return false;
    const find = (names, name, otherwise) => names.includes(name) ? names.indexOf(name) : otherwise;
    state.signal = find(explorer.signals.map(signal => signal.name), parts.get("signal"), 0);
    const signal = explorer.signals[state.signal];
    state.tau = find(signal.taus, parts.get("tau"), signal.start);
    state.budget = parseWhole(parts.get("budget"), 1, candidates, explorer.budget);
    state.context = parseWhole(parts.get("context"), 1, 2 ** 40, state.context);
    state.domain = signal.domains.length > 1 ? find(signal.domains, parts.get("domain"), -1) + 1 : 0;
    const names = layouts.map(({ name }) => name), probe = find(explorer.signals.map(({ name }) => name), parts.get("against"), -1);
    state.compared = probe < 0 ? find(names, parts.get("with"), -1) : -2 - probe;
    state.selected = find(names, parts.get("layout"), -1);
    if (state.selected >= 0) state.budget = count(effective(layouts[state.selected].mask));
    return true;
  }
  function refresh() {
    fill(element("signal"), explorer.signals.map(({ name, noun }, number) => [number, name + ": " + noun]), state.signal);
    element("signal-row").hidden = explorer.signals.length < 2;
    element("context").value = state.context;
    fillDomains();
    fillLayouts();
    draw();
  }
  function fitBudget() { /* set the budget to as many global heads as fit into the memory limit; say where not one does */
    const { cache } = explorer.signals[state.signal], limit = Number(state.limit) * 2 ** 20;
    element("fits").textContent = "";
    if (!cache || !limit) return;
    state.selected = -1;
    const local = memory(cache, 0), perHead = (memory(cache, candidates) - local) / candidates;
    const fitting = perHead ? Math.floor((limit - local) / perHead) : local <= limit ? candidates : 0;
    if (fitting < 1) element("fits").textContent = "nothing fits: " + (local > limit ? "the windows alone take " + size(local) : "one global head takes " + size(local + perHead));
    state.budget = Math.min(candidates, Math.max(1, fitting));
  }
  function select(index) {
    state.selected = index;
    if (index >= 0) state.budget = count(effective(layouts[index].mask));
    state.limit = "";
    fitBudget();
    fillLayouts();
  }
  function goTo(index) { /* show a layout that was chosen elsewhere on the page */
    hasChanged = true;
    select(index);
    draw();
    map.closest("section").scrollIntoView({ block: "start" });
    element("selected").focus({ preventScroll: true });
  }
  function listen(name, change) {
    element(name).addEventListener("input", event => { hasChanged = true; change(event.target.value); draw(); });
  }
  element("budget").max = candidates;
  listen("budget", value => { state.budget = Number(value); state.limit = ""; state.selected = -1; fitBudget(); });
  listen("tau", value => { state.tau = Number(value); });
  listen("domain", value => { state.domain = Number(value); });
  listen("compared", value => { state.compared = Number(value); });
  listen("selected", value => { select(Number(value)); });
  listen("context", value => { state.context = parseWhole(value, 1, 2 ** 40, state.context); fitBudget(); });
  listen("signal", value => {
    state.signal = Number(value);
    state.tau = explorer.signals[state.signal].start;
    state.domain = 0;
    if (state.compared === -2 - state.signal) state.compared = -1;
    fillDomains();
    fillLayouts();
    fitBudget();
  });
  listen("limit", value => { state.limit = value; fitBudget(); });
  if (explorer.measured.length) element("measured").addEventListener("click", event => {
    if (!event.target.dataset.layout) return;
    hasChanged = true;
    state.compared = Number(event.target.dataset.layout);
    fillLayouts();
    draw();
  });
  for (const link of document.querySelectorAll("a[data-layout]")) link.addEventListener("click", event => {
    event.preventDefault();
    goTo(Number(link.dataset.layout));
  });
  addEventListener("hashchange", () => { if (restore()) refresh(); });
  restore();
  refresh();
  cells.forEach((cell, index) => cell.setAttribute("aria-label", label(index)));
  measuredTable(explorer, layouts, mask => coverageOf(table(0, explorer.signals[0].start).values[0], mask, explorer.signals[0]), goTo);
  linkPoints(explorer, goTo);
  linkClouds(explorer, layouts, goTo);
  for (const part of document.querySelectorAll("[data-explorer]")) part.hidden = false;
}
/* Read bits from base64, the first bit of a byte first. */
function unpackBits(base64, length) {
  const bytes = atob(base64);
  return Uint8Array.from({ length }, (_, index) => bytes.charCodeAt(index >> 3) >> 7 - index % 8 & 1);
}
/* Start the explorer once its tables are decompressed. */
async function loadExplorer(explorer) {
  await Promise.all(explorer.signals.map(async signal => Object.assign(signal, JSON.parse(await gunzip(signal.tables)))));
  startExplorer(explorer);
}
if (data.explorer && globalThis.DecompressionStream) loadExplorer(data.explorer);
