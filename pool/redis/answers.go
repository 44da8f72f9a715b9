package redis

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"

	"github.com/kvagent/kvagent/pool/remote"
)

// The library allocates what a server's lengths say, and panics in a goroutine of its own if an
// answer is none to its commands. So bounded parses what passes in both directions, and ends the
// connection before the library sees such an answer.

// Limits of connections and answers.
const (
	readBuffer     = 32 << 10 // bytes; no line of an answer is longer
	maxDepth       = 8        // of arrays in arrays
	maxDigits      = 18       // of a number
	maxConnections = 128      // besides those that Options.Concurrency needs: nodes of a cluster
)

// connections opens connections to servers, and bounds their number.
type connections struct {
	max       int
	redirects bool // answers MOVED and ASK are errors that make the library ask where the slots are

	mu   sync.Mutex
	open map[*bounded]bool // nil after close
}

// dial is rueidis.ClientOption.DialCtxFn.
func (cs *connections) dial(ctx context.Context, addr string, d *net.Dialer, t *tls.Config) (net.Conn, error) {
	c := &bounded{all: cs}
	if err := cs.add(c); err != nil {
		return nil, err
	}
	dial := d.DialContext
	if t != nil {
		dial = (&tls.Dialer{NetDialer: d, Config: t}).DialContext
	}
	nc, err := dial(ctx, "tcp", addr)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	switch {
	case err != nil:
		delete(cs.open, c)
		return nil, err
	case cs.open == nil:
		return nil, errors.Join(net.ErrClosed, nc.Close())
	}
	c.Conn, c.in = nc, bufio.NewReaderSize(nc, readBuffer)
	return c, nil
}

// add takes a place for a connection.
func (cs *connections) add(c *bounded) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	switch {
	case cs.open == nil:
		return net.ErrClosed
	case len(cs.open) >= cs.max:
		return fmt.Errorf("redis: %d connections are open, which is the limit", cs.max)
	}
	cs.open[c] = true
	return nil
}

// close closes all connections, also later ones. The library's own Close waits for answers.
func (cs *connections) close() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := range cs.open {
		if c.Conn != nil {
			c.Conn.Close()
		}
	}
	cs.open = nil
}

// bounded is a connection to a server. One goroutine may read while another one writes.
type bounded struct {
	net.Conn
	all *connections
	in  *bufio.Reader

	// Of Read:
	err    error     // why nothing more is read
	line   []byte    // checked, and not read yet; inside of in's buffer
	data   int       // bytes of a string that are still to be read
	tail   bool      // the line after them, which is empty, is still to be read
	left   allowance // of the answer that is being read
	nested []int     // elements still to come of each array that is open, the innermost last

	out commands // of Write

	mu    sync.Mutex
	asked []allowance // of answers that are still to come
}

// Close implements net.Conn.
func (c *bounded) Close() error {
	c.all.mu.Lock()
	delete(c.all.open, c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// Write implements net.Conn.
func (c *bounded) Write(p []byte) (int, error) {
	if err := c.ask(p); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// ask notes which answers commands ask for, before they are sent.
func (c *bounded) ask(p []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.read(p, func(a allowance) { c.asked = append(c.asked, a) })
}

// Read implements net.Conn. It does not wait for more while it has something.
func (c *bounded) Read(p []byte) (n int, err error) {
	for n < len(p) && c.err == nil && (n == 0 || c.ready()) {
		var got int
		got, c.err = c.next(p[n:])
		n += got
	}
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	return 0, c.err
}

// ready reports whether next does not wait.
func (c *bounded) ready() bool {
	if len(c.line) > 0 {
		return true
	}
	have, _ := c.in.Peek(c.in.Buffered())
	return len(have) > 0 && (c.data > 0 || bytes.IndexByte(have, '\n') >= 0)
}

// next reads some of a line after it was checked, or of a string.
func (c *bounded) next(p []byte) (n int, err error) {
	if len(c.line) == 0 && c.data > 0 {
		n, err = c.in.Read(p[:min(len(p), c.data)])
		c.data -= n
		return n, err
	}
	if len(c.line) == 0 {
		line, err := c.in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			err = fmt.Errorf("redis: %w: a line of more than %d bytes", remote.ErrAnswer, readBuffer)
		}
		if err == nil {
			err = c.check(line)
		}
		if err != nil {
			return 0, err
		}
		c.line = line
	}
	n = copy(p, c.line)
	c.line = c.line[n:]
	return n, nil
}

func (c *bounded) check(line []byte) error {
	if len(c.nested) == 0 && !c.tail {
		if err := c.begin(); err != nil {
			return err
		}
	}
	text, ended := bytes.CutSuffix(line, []byte("\r\n"))
	if !ended || bytes.IndexByte(text, '\r') >= 0 || c.tail != (len(text) == 0) {
		return fmt.Errorf("redis: %w: line %.40q", remote.ErrAnswer, line)
	}
	c.left.bytes -= len(line)
	if c.tail {
		c.tail = false
		c.endElement()
		return nil
	}
	if err := c.element(text[0], text[1:]); err != nil {
		return err
	}
	if c.left.bytes < 0 || c.left.elements < 0 || len(c.nested) > maxDepth {
		return fmt.Errorf("redis: %w: line %.40q of an answer that is too large", remote.ErrAnswer, line)
	}
	return nil
}

// begin begins to read the answer to the next command.
func (c *bounded) begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.asked) == 0 {
		return fmt.Errorf("redis: %w: to no command", remote.ErrAnswer)
	}
	c.left, c.asked = c.asked[0], c.asked[1:]
	return nil
}

// element takes an element of an answer by its kind. Those that no command asks for are errors:
// pushes, attributes, strings and arrays without a length, and numbers other than integers.
func (c *bounded) element(kind byte, text []byte) error {
	valid := true
	switch kind {
	case '+':
		c.endElement()
	case '-':
		valid = len(text) <= slack && c.redirect(text)
		c.endElement()
	case ':':
		_, valid = integer(text)
		c.endElement()
	case '_':
		valid = len(text) == 0
		c.endElement()
	case '$', '=':
		var n int
		if n, valid = integer(text); n == -1 && kind == '$' {
			c.endElement()
			break
		}
		valid = valid && n >= 0
		c.data, c.tail = n, true
		c.left.bytes -= min(max(n, 0), c.left.bytes+1)
	case '*', '%':
		var n int
		if n, valid = integer(text); n == -1 && kind == '*' || n == 0 {
			c.endElement()
			break
		}
		if valid = valid && 0 < n && n <= c.left.elements; valid {
			if kind == '%' {
				n *= 2
			}
			c.left.elements -= n
			c.nested = append(c.nested, n)
		}
	default:
		valid = false
	}
	if !valid {
		return fmt.Errorf("redis: %w: element %.40q", remote.ErrAnswer, string(kind)+string(text))
	}
	return nil
}

func (c *bounded) endElement() {
	for len(c.nested) > 0 {
		last := len(c.nested) - 1
		if c.nested[last]--; c.nested[last] > 0 {
			return
		}
		c.nested = c.nested[:last]
	}
}

// tryAgain is an error after which the library asks the cluster where the slots are.
const tryAgain = "TRYAGAIN"

// redirect overwrites an error that names another server, which the library would dial whatever it
// is, again and again. It returns false for one that is too short.
func (c *bounded) redirect(text []byte) bool {
	what := strings.TrimPrefix(string(text[:min(len(text), 16)]), "ERR ")
	if !c.all.redirects || !strings.HasPrefix(what, "MOVED") && !strings.HasPrefix(what, "ASK") {
		return true
	}
	return copy(text, tryAgain) == len(tryAgain)
}
