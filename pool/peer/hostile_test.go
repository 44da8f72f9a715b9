package peer

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// connect makes an authenticated connection to a server, whose client the test plays.
func connect(t testing.TB, addr string, auth Auth) *conn {
	t.Helper()
	raw, err := net.Dial("tcp", addr)
	check(t, err)
	t.Cleanup(func() { raw.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := dialled(ctx, raw, addr, &auth, time.Minute)
	check(t, err)
	return c
}

// closes reads until the other side has ended the connection, and returns the text of its ERROR.
func closes(t testing.TB, c *conn) (text string) {
	t.Helper()
	for {
		h, err := c.next()
		if err != nil {
			return text
		}
		p, err := c.rest(int(h.length))
		if err != nil {
			return text
		}
		if h.kind == kindError {
			text = string(p)
		}
	}
}

// TestHostileClient: whatever an authenticated client sends, its connection ends, and the server
// serves the others.
func TestHostileClient(t *testing.T) {
	spec := specOf(1, 64<<10)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	h := chain("a", 20)
	p.save(h)
	s := serve(t, p.config())
	whole := get{space: spec.Fingerprint, length: 64 << 10, hashes: h.Slice(0, 2)}
	frame := func(k kind, length uint32) []byte {
		b := make([]byte, headerBytes)
		(&header{kind: k, id: 7, length: length}).put(b)
		return b
	}
	sub := subscribe{space: spec.Fingerprint, name: "r", wait: time.Minute,
		groups: []subscribeGroup{{0, h}}}
	p.set("r", Open, 0)
	for name, c := range map[string]struct {
		do   func(c *conn) error
		says string
	}{
		"random bytes":  {func(c *conn) error { return c.writeAll(noise(300)) }, "begins with"},
		"without a MAC": {func(c *conn) error { return c.writeAll(frame(kindPing, 0)) }, "MAC"},
		"truncated": {func(c *conn) error {
			if err := c.writeAll(frame(kindGet, 56)); err != nil {
				return err
			}
			return c.raw.(*net.TCPConn).CloseWrite()
		}, ""},
		"oversized": {func(c *conn) error { return c.writeAll(frame(kindSubscribe, 1<<30)) }, "allowed"},
		"BLOCKS":    {func(c *conn) error { return c.send(kindBlocks, 1, make([]byte, 1<<10)) }, "from a client"},
		"HELLO":     {func(c *conn) error { return c.send(kindHello, 0, make([]byte, 8)) }, "from a client"},
		"kind 0":    {func(c *conn) error { return c.send(0, 0, nil) }, "kind"},
		"repeated frame": {func(c *conn) error {
			if err := c.send(kindPing, 0, nil); err != nil {
				return err
			}
			return c.writeAll(slices.Clone(c.frame))
		}, "MAC"},
		"altered GET": {func(c *conn) error {
			p := whole.encode(nil)
			c.seal(kindGet, 1, p, 0)
			c.frame[len(c.frame)-1] ^= 1
			return c.writeAll(c.frame)
		}, "MAC"},
		"GET of nothing": {func(c *conn) error { return c.send(kindGet, 1, whole.encode(nil)[:getBytes]) }, "GET"},
		"GET of too much": {func(c *conn) error {
			m := whole
			m.length = 5 << 20
			return c.send(kindGet, 1, m.encode(nil))
		}, "GET of 2 blocks"},
		"SUBSCRIBE cut off": {func(c *conn) error {
			b := sub.encode()
			return c.send(kindSubscribe, 1, b[:len(b)-1])
		}, "SUBSCRIBE"},
		"SUBSCRIBE twice": {func(c *conn) error {
			m := sub
			m.groups = []subscribeGroup{{0, chain("not there", 3)}}
			return errors.Join(c.send(kindSubscribe, 1, m.encode()), c.send(kindSubscribe, 1, m.encode()))
		}, "in use"},
		"DELIVERED without a name": {func(c *conn) error { return c.send(kindDelivered, 0, make([]byte, 16)) },
			"DELIVERED"},
	} {
		t.Run(name, func(t *testing.T) {
			conn := connect(t, s.Addr().String(), testKey(t, 1))
			if err := c.do(conn); err != nil {
				t.Fatal(err)
			}
			if text := closes(t, conn); !strings.Contains(text, c.says) {
				t.Errorf("it says %q, not %q", text, c.says)
			}
		})
	}
	client := newClient(t, d.clientConfig())
	if got, err := fetchAll(t, client, s.Addr().String(), d.request("", h)); err != nil || got.Blocks != 40 {
		t.Fatalf("%+v, %v", got, err)
	}
}

// TestRefusedSubscribe: a SUBSCRIBE for which there is no room is verified like any other, and gets
// its END.
func TestRefusedSubscribe(t *testing.T) {
	spec := specOf(1, 4096)
	p := newAgent(t, 16<<20, spec)
	s := serve(t, p.config())
	if !s.budget.take("127.0.0.1", s.cfg.Limits.PeerBytes) {
		t.Fatal("there is no room before")
	}
	defer s.budget.give("127.0.0.1", s.cfg.Limits.PeerBytes)
	m := subscribe{space: spec.Fingerprint, name: "r", groups: []subscribeGroup{{0, chain("a", 1000)}}}
	b, c := m.encode(), connect(t, s.Addr().String(), testKey(t, 1))
	for id := range uint32(2) {
		check(t, c.send(kindSubscribe, id, b))
		h, err := c.next()
		check(t, err)
		payload, err := c.rest(int(h.length))
		check(t, err)
		if end, _, err := parseEnd(payload); err != nil || h.kind != kindEnd || h.id != id || end != EndRefused {
			t.Errorf("SUBSCRIBE %d: kind %d, id %d: %v, %v", id, h.kind, h.id, end, err)
		}
	}
	c.seal(kindSubscribe, 2, b, 0)
	c.frame[8] ^= 1 // its id: nothing else of a refused one is used
	check(t, c.writeAll(c.frame))
	if text := closes(t, c); !strings.Contains(text, "MAC") {
		t.Errorf("an altered one: it says %q", text)
	}
}

// noise is bytes that look random.
func noise(n int) []byte {
	b := make([]byte, n)
	content(&pool.Key{}, b)
	return b
}

// TestWrongSpace: a client that asks for a space that the server does not have gets nothing.
func TestWrongSpace(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	h := chain("a", 4)
	p.save(h)
	s, client := serve(t, p.config()), newClient(t, d.clientConfig())
	r := d.request("", h)
	r.Space[3] ^= 1
	if got, err := fetchAll(t, client, s.Addr().String(), r); err != nil || got.End != EndNoSpace ||
		got.Failed[NotStored] != 8 {
		t.Fatalf("%+v, %v", got, err)
	}
	c := connect(t, s.Addr().String(), testKey(t, 1))
	m := get{space: r.Space, length: 4096, hashes: h}
	check(t, c.send(kindGet, 1, m.encode(nil)))
	head, err := c.next()
	check(t, err)
	b, err := c.rest(int(head.length))
	check(t, err)
	rows, err := parseTable(b, nil)
	if err != nil || len(rows) != 4 || slices.ContainsFunc(rows, func(r row) bool { return r.status != pool.Missing }) {
		t.Errorf("%+v, %v", rows, err)
	}
}

// fakeServer accepts clients and plays a server to each.
func fakeServer(t testing.TB, play func(c *conn, sub uint32, m subscribe) error) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	ended := make(chan struct{})
	cfg := Config{Auth: testKey(t, 1), Timeout: time.Minute}
	go func() {
		defer close(ended)
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			func() {
				defer raw.Close()
				c, err := accepted(raw, &cfg, func() {})
				if err != nil {
					return
				}
				h, err := c.next()
				if err != nil || h.kind != kindSubscribe {
					return
				}
				b, err := c.rest(int(h.length))
				if err != nil {
					return
				}
				if m, err := parseSubscribe(slices.Clone(b)); err == nil {
					_ = play(c, h.id, m)
				}
			}()
		}
	}()
	t.Cleanup(func() { l.Close(); <-ended })
	return l.Addr().String()
}

// asked reads the next GET.
func asked(c *conn) (id uint32, m get, err error) {
	for {
		h, err := c.next()
		if err != nil {
			return 0, m, err
		}
		b, err := c.rest(int(h.length))
		if err != nil {
			return 0, m, err
		}
		if h.kind == kindGet {
			m, err = parseGet(slices.Clone(b))
			return h.id, m, err
		}
	}
}

// sendBytes sends a BLOCKS with these rows and bytes, of blocks of 4,096 bytes. It announces length
// bytes.
func sendBytes(c *conn, id uint32, rows []row, length int, data []byte) error {
	table := encodeTable(nil, rows)
	c.writing.Lock()
	defer c.writing.Unlock()
	c.seal(kindBlocks, id, table, int64(length+(length+4095)/4096*macBytes))
	all := slices.Clone(c.frame)
	for block := range slices.Chunk(data, 4096) {
		all = c.out.Tag(append(all, block...), block)
	}
	return c.writeAll(all)
}

// good is the right answer to a GET, altered by change.
func good(m *get, change func(rows []row, data []byte)) (rows []row, data []byte) {
	for i := range m.hashes.N {
		key := pool.Key{Space: m.space, Group: m.group, Shard: m.shard, Hash: pool.MakeHash(m.hashes.At(i))}
		b := make([]byte, m.length)
		content(&key, b)
		rows = append(rows, row{pool.OK, pool.Sum(key.Seed(m.length), b)})
		data = append(data, b...)
	}
	if change != nil {
		change(rows, data)
	}
	return rows, data
}

// TestHostileServer: whatever an authenticated server sends, no wrong byte is visible, no slot
// stays reserved, and the fetch ends.
func TestHostileServer(t *testing.T) {
	spec := specOf(1, 4096)
	h := chain("a", 4)
	have := func(c *conn, sub uint32, runs ...run) error { return c.send(kindHave, sub, encodeHave(runs)) }
	one := func(change func(rows []row, data []byte)) func(c *conn, sub uint32, m subscribe) error {
		return func(c *conn, sub uint32, _ subscribe) error {
			if err := have(c, sub, run{0, 1}); err != nil {
				return err
			}
			id, m, err := asked(c)
			if err != nil {
				return err
			}
			rows, data := good(&m, change)
			err = sendBytes(c, id, rows, len(data), data)
			if err == nil {
				err = c.send(kindEnd, sub, encodeEnd(EndComplete, 0))
			}
			_, _ = io.Copy(io.Discard, c.raw)
			return err
		}
	}
	for name, c := range map[string]struct {
		play   func(c *conn, sub uint32, m subscribe) error
		lost   string // part of the error; empty: the fetch ends well
		stored int
		failed Reason // one that must be counted; Reasons: it depends on who is first
	}{
		"right":      {one(nil), "", 1, NotStored},
		"wrong sum":  {one(func(rows []row, _ []byte) { rows[0].sum++ }), "", 0, Corrupt},
		"wrong byte": {one(func(_ []row, data []byte) { data[4095] ^= 4 }), "", 0, Corrupt},
		"of another block": {one(func(rows []row, data []byte) {
			key := pool.Key{Space: spec.Fingerprint, Hash: pool.MakeHash(h.At(1))}
			content(&key, data)
			rows[0].sum = pool.Sum(key.Seed(4096), data)
		}), "", 0, Corrupt},
		"more blocks than asked for": {one(func(rows []row, _ []byte) { rows[0].status = pool.Missing }), "BLOCKS", 0,
			Abandoned},
		"a status of no kind": {one(func(rows []row, _ []byte) { rows[0].status = pool.InProgress }), "status 2", 0,
			Abandoned},
		"HAVE of no block": {func(c *conn, sub uint32, _ subscribe) error { return have(c, sub, run{7, 2}) }, "HAVE", 0,
			NotStored},
		"HAVE twice": {func(c *conn, sub uint32, _ subscribe) error { return have(c, sub, run{1, 1}, run{0, 2}) },
			"twice", 0, NotStored},
		"HAVE after END": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			return errors.Join(err, c.send(kindEnd, sub, encodeEnd(EndComplete, 0)), have(c, sub, run{1, 1}))
		}, "after END", 0, Reasons},
		"not asked for": {func(c *conn, _ uint32, _ subscribe) error {
			return sendBytes(c, 9, []row{{pool.OK, 1}}, 4096, make([]byte, 4096))
		}, "not asked for", 0, NotStored},
		"another id": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			id, m, aerr := asked(c)
			rows, data := good(&m, nil)
			return errors.Join(err, aerr, sendBytes(c, id+1, rows, len(data), data))
		}, "not asked for", 0, Abandoned},
		"twice": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			id, m, aerr := asked(c)
			rows, data := good(&m, nil)
			send := func() error { return sendBytes(c, id, rows, len(data), data) }
			return errors.Join(err, aerr, send(), send())
		}, "not asked for", 1, NotStored},
		"short table": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			id, m, aerr := asked(c)
			_, data := good(&m, nil)
			return errors.Join(err, aerr, sendBytes(c, id, nil, len(data), data))
		}, "MAC", 0, Abandoned},
		"longer than it": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			id, m, aerr := asked(c)
			rows, data := good(&m, nil)
			return errors.Join(err, aerr, sendBytes(c, id, rows, len(data)+1, append(data, 0)))
		}, "must be", 0, Abandoned},
		"cut off": {func(c *conn, sub uint32, _ subscribe) error {
			err := have(c, sub, run{0, 1})
			id, m, aerr := asked(c)
			rows, data := good(&m, nil)
			return errors.Join(err, aerr, sendBytes(c, id, rows, len(data), data[:4000]))
		}, "EOF", 0, Abandoned},
		"gone": {func(*conn, uint32, subscribe) error { return nil }, "EOF", 0, NotStored},
		"SUBSCRIBE": {func(c *conn, _ uint32, m subscribe) error {
			return c.send(kindSubscribe, 1, m.encode())
		}, "from a server", 0, NotStored},
		"random bytes": {func(c *conn, _ uint32, _ subscribe) error {
			return c.writeAll(noise(4000))
		}, "begins with", 0, NotStored},
		"END of no kind": {func(c *conn, sub uint32, _ subscribe) error {
			return c.send(kindEnd, sub, encodeEnd(EndLost, 0))
		}, "END", 0, NotStored},
		"error": {func(c *conn, _ uint32, _ subscribe) error {
			return c.send(kindError, 0, []byte("so it is"))
		}, "so it is", 0, NotStored},
	} {
		t.Run(name, func(t *testing.T) {
			d := newAgent(t, 16<<20, spec)
			addr := fakeServer(t, func(conn *conn, sub uint32, m subscribe) error {
				defer func() { // what was sent is read before the connection is gone
					_ = conn.raw.(*net.TCPConn).CloseWrite()
					_, _ = io.Copy(io.Discard, conn.raw)
				}()
				return c.play(conn, sub, m)
			})
			ccfg := d.clientConfig()
			ccfg.Streams, ccfg.Timeout = 1, time.Minute
			client := newClient(t, ccfg)
			r := d.request("r", h)
			r.Groups = r.Groups[:1]
			got, err := fetchAll(t, client, addr, r)
			switch {
			case c.lost == "" && err != nil:
				t.Errorf("%v", err)
			case c.lost != "" && (!errors.Is(err, ErrLost) || !strings.Contains(err.Error(), c.lost) ||
				got.End != EndLost):
				t.Errorf("%v, not of %q", err, c.lost)
			}
			if got.Blocks != c.stored || c.failed < Reasons && got.Failed[c.failed] == 0 {
				t.Errorf("a block was served unverified, or not at all: %+v", got)
			}
			if n := d.has(h); n != c.stored {
				t.Errorf("%d blocks are there, not %d", n, c.stored)
			}
			d.nothingLeft()
		})
	}
}

// TestWrongKey: neither side talks to one with another key, and both say so.
func TestWrongKey(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	s := serve(t, p.config())
	ccfg := d.clientConfig()
	ccfg.Auth = testKey(t, 2)
	client := newClient(t, ccfg)
	if _, err := fetchAll(t, client, s.Addr().String(), d.request("", chain("a", 4))); !errors.Is(err, ErrAuth) {
		t.Errorf("%v", err)
	}
	// A client that does not mind the server's proof.
	raw, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	defer raw.Close()
	m := hello{low: version, high: version, timeout: time.Second}
	check(t, sendBare(raw, kindHello, m.encode()))
	ch, err := bare(raw, kindChallenge)
	check(t, err)
	tr := transcript{key: make([]byte, 32), hello: m.encode(), challenge: ch}
	check(t, sendBare(raw, kindProof, tr.derive(labelClient)))
	if n, err := raw.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes were answered", n)
	}
	// Nor one that sends the server's own proof back.
	raw2, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	defer raw2.Close()
	check(t, sendBare(raw2, kindHello, m.encode()))
	ch, err = bare(raw2, kindChallenge)
	check(t, err)
	check(t, sendBare(raw2, kindProof, ch[challengeBytes-proofBytes:]))
	if n, err := raw2.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes were answered", n)
	}
}

// recorder keeps what a connection sent.
type recorder struct {
	net.Conn
	sent []byte
}

func (r *recorder) Write(b []byte) (int, error) {
	r.sent = append(r.sent, b...)
	return r.Conn.Write(b)
}

// TestReplayedHandshake: what a client sent once opens no second connection.
func TestReplayedHandshake(t *testing.T) {
	p := newAgent(t, 16<<20, specOf(1, 4096))
	s := serve(t, p.config())
	raw, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	r := &recorder{Conn: raw}
	auth := testKey(t, 1)
	c, err := dialled(t.Context(), r, s.Addr().String(), &auth, time.Second)
	check(t, err)
	check(t, c.send(kindPing, 0, nil))
	raw.Close()
	again, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	defer again.Close()
	_, err = again.Write(r.sent)
	check(t, err)
	answer, _ := io.ReadAll(again)
	if want := headerBytes + challengeBytes; len(answer) > want {
		t.Errorf("%d bytes were answered, the challenge has %d", len(answer), want)
	}
	if n := s.Stats().Unauthenticated; n != 1 {
		t.Errorf("%d counted", n)
	}
}

// TestVersions: a client of another version is told so.
func TestVersions(t *testing.T) {
	p := newAgent(t, 16<<20, specOf(1, 4096))
	s := serve(t, p.config())
	raw, err := net.Dial("tcp", s.Addr().String())
	check(t, err)
	defer raw.Close()
	m := hello{low: version + 1, high: 9, timeout: time.Second}
	check(t, sendBare(raw, kindHello, m.encode()))
	if _, err := bare(raw, kindChallenge); err == nil || !strings.Contains(err.Error(), "versions 4 to 9") {
		t.Error(err)
	}
}

// TestAuthTLS: the other side needs a certificate of the same authority, and of the right host.
func TestAuthTLS(t *testing.T) {
	spec := specOf(1, 4096)
	p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
	cfg := p.config()
	cfg.Auth = tlsAuth(t)
	s := serve(t, cfg)
	for name, auth := range map[string]Auth{"other authority": tlsAuth(t), "key": testKey(t, 1)} {
		ccfg := d.clientConfig()
		ccfg.Auth = auth
		client := newClient(t, ccfg)
		_, err := fetchAll(t, client, s.Addr().String(), d.request("", chain("a", 4)))
		if err == nil {
			t.Errorf("%s: it connected", name)
		}
	}
	ccfg := d.clientConfig()
	ccfg.Auth = cfg.Auth
	ccfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr().String())
	}
	client := newClient(t, ccfg)
	_, err := fetchAll(t, client, "elsewhere:1", d.request("", chain("a", 4)))
	if !errors.Is(err, ErrAuth) || !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("a certificate of another host: %v", err)
	}
}
