package redis

import (
	"bytes"
	"errors"
	"fmt"
)

// allowance bounds the answer to a command.
type allowance struct {
	bytes    int // on the wire
	elements int // of all its arrays and maps; the library allocates 40 bytes for each
}

// slack is what each answer may have besides the data that was asked for: an error, framing.
const slack = 1 << 10 // bytes

// allowed returns the bounds of the answer to a command.
func allowed(words *[maxWords]word) allowance {
	switch string(words[0].text()) {
	case "GETRANGE":
		from, _ := integer(words[2].text())
		to, _ := integer(words[3].text())
		return allowance{bytes: min(max(to-from, 0), maxValue) + 1 + slack}
	case "HELLO":
		return allowance{bytes: 64 << 10, elements: 1 << 10}
	case "CLUSTER":
		// of about 4,000 ranges of slots; for each node the library takes 3 KiB
		return allowance{bytes: 4 << 20, elements: 64 << 10}
	}
	return allowance{bytes: slack, elements: 8}
}

// maxWords is how many arguments of a command are kept.
const maxWords = 4

// word is the beginning of an argument.
type word struct {
	bytes [24]byte
	n     int
}

func (w *word) text() []byte    { return w.bytes[:w.n] }
func (w *word) append(p []byte) { w.n += copy(w.bytes[w.n:], p) }

// commands reads what the library writes: arrays of strings.
type commands struct {
	line  []byte // the length that is being read
	args  int    // arguments of the command that are still to come
	data  int    // bytes of the argument that are still to come
	words [maxWords]word
	at    int // index of the argument
}

var errCommand = errors.New("redis: the library writes no command")

// read reads the next bytes, and calls ended with the bounds of the answer to each whole command.
func (c *commands) read(p []byte, ended func(allowance)) error {
	for len(p) > 0 {
		if c.data > 0 {
			n := min(c.data, len(p))
			if c.at < maxWords {
				c.words[c.at].append(p[:n])
			}
			p, c.data = p[n:], c.data-n
			continue
		}
		n := bytes.IndexByte(p, '\n') + 1
		if n == 0 {
			c.line = append(c.line, p...)
			return nil
		}
		c.line, p = append(c.line, p[:n]...), p[n:]
		if err := c.endLine(ended); err != nil {
			return err
		}
		c.line = c.line[:0]
	}
	return nil
}

// endLine takes a line: the number of arguments, the bytes of one, or the empty one after it.
func (c *commands) endLine(ended func(allowance)) error {
	text, _ := bytes.CutSuffix(c.line, []byte("\r\n"))
	if len(text) == 0 {
		c.at++
		if c.args--; c.args == 0 {
			ended(allowed(&c.words))
		}
		return nil
	}
	n, valid := integer(text[1:])
	switch {
	case valid && text[0] == '*' && c.args == 0 && n > 0:
		c.args, c.at, c.words = n, 0, [maxWords]word{}
	case valid && text[0] == '$' && c.args > 0 && n >= 0:
		c.data = n
	default:
		return fmt.Errorf("%w: %.40q", errCommand, c.line)
	}
	return nil
}

// integer parses an integer in its only form.
func integer(text []byte) (n int, ok bool) {
	digits, negative := bytes.CutPrefix(text, []byte("-"))
	if len(digits) == 0 || len(digits) > maxDigits || digits[0] == '0' && len(text) > 1 {
		return 0, false
	}
	for _, d := range digits {
		if d < '0' || d > '9' {
			return 0, false
		}
		n = 10*n + int(d-'0')
	}
	if negative {
		n = -n
	}
	return n, true
}
