/* Decode the numbers that `codes.py` writes: exponential-Golomb codes, six bits per letter. */
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
function unzigzag(number) { return number % 2 ? (number + 1) / 2 : -number / 2; }
class Code {
  constructor(text) {
    this.sixes = Uint8Array.from(text, letter => LETTERS.indexOf(letter));
    this.at = 0;
  }
  bit() { return this.sixes[Math.floor(this.at / 6)] >> 5 - this.at++ % 6 & 1; }
  take(order) {
    let length = order, number = 1;
    while (!this.bit()) length++;
    for (; length; length--) number = 2 * number + this.bit();
    return number - 2 ** order;
  }
  run(orders) {
    const least = unzigzag(this.take(0)), above = orders.map(order => this.take(order));
    return { numbers: above.map(number => least + number), orders: above.map(number => 32 - Math.clz32(number)) };
  }
  flags(length) { return Uint8Array.from({ length }, () => this.bit()); }
}

/* Decode a probe (`choices.coded`) at every threshold: levels of the heads over all text and by domain, order, coverage. */
function decode(signal, total) {
  const code = new Code(signal.tables), tables = [], zeros = new Array(total).fill(0);
  const parts = Math.max(1, signal.shares.length), orders = Array.from({ length: parts }, () => zeros.map(() => signal.order));
  let before = orders.map(() => zeros);
  while (tables.length < signal.taus.length) {
    const levels = before.map((earlier, part) => {
      const steps = code.run(orders[part]);
      orders[part] = steps.orders;
      return earlier.map((level, head) => tables.length ? level - steps.numbers[head] : steps.numbers[head]);
    });
    before = levels;
    const all = signal.shares.length ? mixed(code, signal.shares, levels) : levels[0];
    const left = zeros.map((_, head) => head).sort((one, other) => all[other] - all[one] || one - other);
    const order = code.run(zeros).numbers.map(at => left.splice(at, 1)[0]);
    tables.push({ levels: signal.shares.length ? [all, ...levels] : [all], order, covered: covered(code, all, order) });
  }
  return tables;
}
/* Levels over all text: their prediction from the domains' levels, plus the coded differences. */
function mixed(code, shares, levels) {
  const whole = Math.max(1, shares.reduce((sum, share) => sum + share, 0));
  return code.run(levels[0].map(() => 0)).numbers.map((number, head) =>
    Math.floor(levels.reduce((sum, one, part) => sum + shares[part] * (2 * one[head] + 1), 0) / (2 * whole)) + unzigzag(number));
}
/* Coverage of the first heads of the order: its prediction from the levels, plus the coded differences. */
function covered(code, all, order) {
  const heights = all.map(level => Math.max(0, 2 * level + 1)), whole = heights.reduce((sum, height) => sum + height, 0);
  let sum = 0, off = 0;
  return code.run(order.map(() => 0)).numbers.map((number, rank) => {
    sum += heights[order[rank]];
    off += unzigzag(number);
    return (Math.floor(10000 * sum / whole) + off) / 10000;
  });
}
