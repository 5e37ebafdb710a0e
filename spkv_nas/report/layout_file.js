/* Write a layout file's hashes, and YAML as PyYAML writes it. */
/* The first 8 hexadecimal digits of SHA-256 (FIPS 180-4); crypto.subtle is asynchronous and missing on insecure pages. */
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
      const offset = block + 4 * i;
      words[i] = bytes[offset] << 24 | bytes[offset + 1] << 16 | bytes[offset + 2] << 8 | bytes[offset + 3];
    }
    for (let i = 16; i < 64; i++) {
      const early = words[i - 15], late = words[i - 2];
      words[i] = words[i - 16] + (turn(early, 7) ^ turn(early, 18) ^ early >>> 3) + words[i - 7] + (turn(late, 17) ^ turn(late, 19) ^ late >>> 10);
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + (e & f ^ ~e & g) + ROUNDS[i] + words[i] | 0;
      const second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + (a & b ^ a & c ^ b & c) | 0;
      h = g; g = f; f = e; e = d + first | 0; d = c; c = b; b = a; a = first + second | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { state[i] += word; });
  }
  return (state[0] >>> 0).toString(16).padStart(8, "0");
}

/* YAML as PyYAML writes it: quote text that would be read as a number; write shares with a decimal point. */
function yamlText(digits) { return /^(0b[01]+|0[0-7]+|[1-9]\d*|\d+e\d+)$/.test(digits) ? "'" + digits + "'" : digits; }
function yamlShare(share) { return Number.isInteger(share) ? share + ".0" : String(share); }
