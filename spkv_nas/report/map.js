/* Redraw the map as the explorer changes: a path per shade, the numbers, and outlines of the chosen heads. */
function minus(text) { return text.replace("-", "\u2212"); }
function written(scale, value) { /* format a value as on the static map */
  const number = scale.factor * value;
  if (Number(number.toFixed(1)) === 0) return "0";
  return minus(number.toFixed(scale.even && Math.abs(number) < 9.95 ? 1 : 0));
}
function shade(scale, value, last) {
  const at = number => scale.even ? Math.asinh(number / scale.even) : number;
  const share = (at(value) - at(scale.low)) / (at(scale.high) - at(scale.low));
  return Math.round(Math.min(1, Math.max(0, share)) * last);
}
function live(map, given, rows) {
  const [columns, step, left, top] = map.dataset.map.split(" ").map(Number), total = rows * columns;
  const still = map.querySelector(".cells"), transform = still.getAttribute("transform");
  still.setAttribute("display", "none"); /* hidden, not removed: small maps reuse its cells */
  map.querySelector(".values").remove();
  const group = make(map, "g", { transform }), values = make(map, "g", { class: "values" });
  const fills = make(group, "g", { transform: "translate(0 " + FILLED / 2 + ")", "stroke-width": FILLED });
  const paths = given.shades.map(stroke => make(fills, "path", { stroke, d: "" })), drawn = paths.map(() => "");
  const other = make(group, "path", { class: "other", d: "" }), global = make(group, "path", { class: "global", d: "" });
  const texts = Array.from({ length: total }, (_, cell) => make(values, "text", {
    x: left + (cell % columns + FILLED / 2) * step, y: top + (Math.floor(cell / columns) + FILLED / 2) * step + 4,
  }));
  const shown = texts.map(() => ""), inks = texts.map(() => "");
  const atOnce = 64; /* numbers written per frame, because text layout is slow */
  let wanted = [], next = 0, rest = 0;
  function paint(scale, numbers) {
    const fresh = paths.map(() => ""), waits = wanted.length && total > atOnce;
    wanted = numbers.map((value, cell) => {
      const level = shade(scale, value, paths.length - 1);
      fresh[level] += "M" + cell % columns + " " + Math.floor(cell / columns) + "h" + FILLED;
      return [written(scale, value), level >= given.dark ? "on-light" : "on-dark"];
    });
    paths.forEach((path, level) => { if (fresh[level] !== drawn[level]) path.setAttribute("d", fresh[level]); });
    drawn.splice(0, drawn.length, ...fresh);
    next = 0;
    clearTimeout(rest);
    if (waits) { /* hide numbers until their colours match the cells */
      values.setAttribute("opacity", "0");
      rest = setTimeout(write, 150, atOnce);
    } else write(total);
  }
  function write(most) {
    for (let room = most; next < total && room; next++) {
      const [text, ink] = wanted[next];
      if (shown[next] === text && inks[next] === ink) continue;
      if (shown[next] !== text) texts[next].textContent = shown[next] = text;
      if (inks[next] !== ink) texts[next].setAttribute("class", inks[next] = ink);
      room--;
    }
    if (next < total) rest = setTimeout(write, 0, atOnce); else values.removeAttribute("opacity");
  }
  function squares(mask) {
    return mask.map((one, cell) => one ? "M" + cell % columns + " " + Math.floor(cell / columns) + "h" + FILLED + "v" + FILLED + "h-" + FILLED + "z" : "").join("");
  }
  function outline(mask, against) {
    global.setAttribute("d", squares(mask));
    other.setAttribute("d", squares(against));
  }
  return { paint, outline };
}
