package peer

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// network is memory that readers reach by a target's name.
type network struct {
	mu      sync.Mutex
	readers map[string]*memReader
}

// memReader is a Reader within this process.
type memReader struct {
	net    *network
	target string
	base   uint64
	arena  []byte

	mu     sync.Mutex
	absent error                                 // returned by Exposed
	before func() error                          // called by Read, which it may hold up or fail
	after  func(pulls []pool.Pull, arena []byte) // called by Read, and may change what was read
	reads  int
}

func (n *network) reader(a *agent, target string, base uint64) *memReader {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.readers == nil {
		n.readers = map[string]*memReader{}
	}
	r := &memReader{net: n, target: target, base: base, arena: a.arena}
	n.readers[target] = r
	return r
}

func (r *memReader) Exposed() (pool.Exposed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return pool.Exposed{Protocol: "tcp", Target: r.target, Address: r.base}, r.absent
}

func (r *memReader) Read(target string, pulls []pool.Pull) error {
	r.mu.Lock()
	r.reads++
	before, after := r.before, r.after
	r.mu.Unlock()
	if before != nil {
		if err := before(); err != nil {
			return err
		}
	}
	r.net.mu.Lock()
	from := r.net.readers[target]
	r.net.mu.Unlock()
	for _, p := range pulls {
		at := p.Address - from.base
		copy(r.arena[p.Offset:p.Offset+p.Length], from.arena[at:at+uint64(p.Length)])
	}
	if after != nil {
		after(pulls, r.arena)
	}
	return nil
}

func (r *memReader) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reads
}

// serverBase is where a server's arena is for the readers of the tests.
const serverBase = 1 << 40

// pulling is a server and a client that both have a reader.
type pulling struct {
	from, to     *agent
	theirs, ours *memReader
	server       *Server
	client       *Client
	addr         string
}

func newPulling(t *testing.T, shards int, change func(*Config, *ClientConfig)) *pulling {
	t.Helper()
	spec := specOf(shards, 4096)
	p := &pulling{from: newAgent(t, 16<<20, spec), to: newAgent(t, 16<<20, spec)}
	net := &network{}
	p.theirs, p.ours = net.reader(p.from, "server:1", serverBase), net.reader(p.to, "client:1", 1<<41)
	cfg, clientCfg := p.from.config(), p.to.clientConfig()
	cfg.Reader, clientCfg.Reader = p.theirs, p.ours
	clientCfg.BreakFirst, clientCfg.BreakLast = time.Hour, time.Hour
	if change != nil {
		change(&cfg, &clientCfg)
	}
	p.server, p.client = serve(t, cfg), newClient(t, clientCfg)
	p.addr = p.server.Addr().String()
	return p
}

// fetches fetches a chain, checks that all of it is there and right, and that the server has
// nothing pinned.
func (p *pulling) fetches(t *testing.T, name string, blocks int) {
	t.Helper()
	h := chain(name, blocks)
	p.from.save(h)
	res, err := fetchAll(t, p.client, p.addr, p.to.request("", h))
	if err != nil || res.Blocks != 2*blocks {
		t.Errorf("%+v, %v", res, err)
	}
	if got := p.to.has(h); got != 2*blocks {
		t.Errorf("%d blocks are there, want %d", got, 2*blocks)
	}
	pooltest.Until(t, "the pins' end", func() bool { return p.server.Stats().Pinned == 0 })
	p.from.nothingLeft()
}

// expect checks how many shards of blocks came by one-sided reads, how many reads failed, and how
// many shards the server has placed.
func (p *pulling) expect(t *testing.T, read, failed, placed uint64) {
	t.Helper()
	c, s := p.client.Stats(), p.server.Stats()
	if c.Read != read || c.ReadsFailed != failed || s.Placed != placed {
		t.Errorf("%d shards read, %d reads failed, %d shards placed; want %d, %d, %d", c.Read, c.ReadsFailed,
			s.Placed, read, failed, placed)
	}
}

// With a reader on both sides no byte of a block goes through the connection.
func TestBlocksAreReadOneSided(t *testing.T) {
	p := newPulling(t, 2, nil)
	p.fetches(t, "a", 100)
	p.expect(t, 400, 0, 400)
	if s := p.server.Stats(); s.Blocks != 400 {
		t.Errorf("%d shards are counted as sent, want 400", s.Blocks)
	}
}

// A reader that fails, or that delivers other bytes, costs a detour: the blocks come in frames, and
// so do the following ones for a while.
func TestOneSidedReadsThatFail(t *testing.T) {
	for name, breaks := range map[string]func(r *memReader){
		"error": func(r *memReader) {
			r.before = func() error { return errors.New("no route") }
		},
		"wrong bytes": func(r *memReader) {
			r.after = func(pulls []pool.Pull, arena []byte) { arena[pulls[0].Offset] ^= 1 }
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPulling(t, 1, nil)
			breaks(p.ours)
			// Neither shard's read ends before the other has begun: a failure would suspend it.
			before := p.ours.before
			p.ours.before = func() error {
				pooltest.Until(t, "both reads", func() bool { return p.ours.count() >= 2 })
				if before != nil {
					return before()
				}
				return nil
			}
			p.fetches(t, "a", 1)
			p.expect(t, 0, 2, 2)
			reads := p.ours.count()
			p.fetches(t, "b", 20)
			if p.ours.count() != reads {
				t.Error("reads go on after a failure")
			}
		})
	}
}

// After a failure the reads that have not begun do not begin, so that a peer that hangs costs the
// time of one read, however many wait.
func TestReadsThatWaitDoNotBegin(t *testing.T) {
	p := newPulling(t, 1, func(_ *Config, k *ClientConfig) { k.BatchBytes = 64 << 10 })
	hold := make(chan struct{})
	p.ours.before = func() error {
		<-hold
		return errors.New("it took too long")
	}
	h := chain("a", 800)
	p.from.save(h)
	done := make(chan error)
	go func() {
		_, err := p.client.Fetch(context.Background(), p.addr, p.to.request("", h), nil)
		done <- err
	}()
	pooltest.Until(t, "reads at the limit, and blocks pinned for more", func() bool {
		return p.ours.count() == maxPulling && p.server.Stats().Pinned > maxPulling*64<<10
	})
	close(hold)
	check(t, <-done)
	if got := p.ours.count(); got != maxPulling {
		t.Errorf("%d reads began, want %d", got, maxPulling)
	}
	if got := p.to.has(h); got != 1600 {
		t.Errorf("%d blocks are there, want 1600", got)
	}
}

// The end of a connection is no failure of reads: it suspends none to come, and those that wait do
// not begin.
func TestReadsThatWaitForALostPeer(t *testing.T) {
	p := newPulling(t, 1, func(_ *Config, k *ClientConfig) { k.BatchBytes = 64 << 10 })
	hold := make(chan struct{})
	p.ours.before = func() error {
		<-hold
		return errors.New("the peer is gone")
	}
	h := chain("a", 300) // less than a quarter of the pool
	p.from.save(h)
	done := make(chan error)
	go func() {
		_, err := p.client.Fetch(context.Background(), p.addr, p.to.request("", h), nil)
		done <- err
	}()
	pooltest.Until(t, "reads at the limit, and blocks pinned for more", func() bool {
		return p.ours.count() == maxPulling && p.server.Stats().Pinned > maxPulling*64<<10
	})
	p.client.mu.Lock()
	l := p.client.nodes[p.addr].link
	p.client.mu.Unlock()
	check(t, p.server.Close())
	<-l.dead
	close(hold)
	if err := <-done; !errors.Is(err, ErrLost) {
		t.Errorf("ended with %v, want lost", err)
	}
	if c := p.client.Stats(); c.ReadsFailed != 0 {
		t.Errorf("%d reads failed, want none", c.ReadsFailed)
	}
	if got := p.ours.count(); got != maxPulling {
		t.Errorf("%d reads began, want %d", got, maxPulling)
	}
}

// Without a reader on the other side, or while there is none on this, blocks come in frames.
func TestNoReader(t *testing.T) {
	t.Run("server has none", func(t *testing.T) {
		p := newPulling(t, 1, func(c *Config, _ *ClientConfig) { c.Reader = nil })
		p.fetches(t, "a", 20)
		if c := p.client.Stats(); c.Read != 0 || c.ReadsFailed == 0 || p.ours.count() != 0 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("server's is down", func(t *testing.T) {
		p := newPulling(t, 1, nil)
		p.theirs.absent = errors.New("starting")
		p.fetches(t, "a", 20)
		if c := p.client.Stats(); c.Read != 0 || p.ours.count() != 0 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("client's is down", func(t *testing.T) {
		p := newPulling(t, 1, nil)
		p.ours.absent = errors.New("starting")
		p.fetches(t, "a", 20)
		p.expect(t, 0, 0, 0)
		p.ours.mu.Lock()
		p.ours.absent = nil
		p.ours.mu.Unlock()
		p.fetches(t, "b", 20)
		p.expect(t, 40, 0, 40)
	})
	t.Run("another protocol", func(t *testing.T) {
		p := newPulling(t, 1, func(c *Config, _ *ClientConfig) { c.Reader = rdma{c.Reader} })
		p.fetches(t, "a", 20)
		if c := p.client.Stats(); c.Read != 0 || c.ReadsFailed == 0 || p.ours.count() != 0 {
			t.Errorf("%+v", c)
		}
	})
}

// rdma is a reader of another protocol.
type rdma struct{ Reader }

func (r rdma) Exposed() (pool.Exposed, error) {
	e, err := r.Reader.Exposed()
	e.Protocol = "rdma"
	return e, err
}

// A connection may pin a bounded number of bytes; blocks beyond them come in frames, and no read is
// suspended because of them.
func TestPinsAreBounded(t *testing.T) {
	p := newPulling(t, 1, func(c *Config, k *ClientConfig) {
		c.Limits.PinnedBytes = 1
		k.Streams, k.BatchBytes = 1, 64<<10
	})
	hold := make(chan struct{})
	p.ours.before = func() error { <-hold; return nil }
	h := chain("a", 100)
	p.from.save(h)
	done := make(chan error)
	go func() {
		_, err := p.client.Fetch(context.Background(), p.addr, p.to.request("", h), nil)
		done <- err
	}()
	pooltest.Until(t, "blocks in frames beside a read", func() bool {
		return p.ours.count() == 1 && p.client.Stats().ReadsFailed > 0
	})
	if s := p.server.Stats(); s.Pinned == 0 {
		t.Error("nothing is pinned during a read")
	}
	close(hold)
	check(t, <-done)
	if got := p.to.has(h); got != 200 {
		t.Errorf("%d blocks are there, want 200", got)
	}
	pooltest.Until(t, "the pins' end", func() bool { return p.server.Stats().Pinned == 0 })
	if p.client.Stats().Read == 0 {
		t.Error("nothing was read")
	}
}

// held is a fetch whose first read is held up.
func (p *pulling) held(ctx context.Context, t *testing.T) (release chan<- error, done <-chan error) {
	t.Helper()
	hold, began, ended := make(chan error), make(chan struct{}), make(chan error, 1)
	p.ours.before = func() error {
		close(began)
		return <-hold
	}
	h := chain("a", 1)
	p.from.save(h)
	r := p.to.request("", h)
	r.Groups = r.Groups[:1]
	go func() {
		_, err := p.client.Fetch(ctx, p.addr, r, nil)
		ended <- err
	}()
	<-began
	return hold, ended
}

// The server's end frees its pins although a read is under way. The client's slot is its own until
// the read has returned, although the connection is gone: Fetch does not return before.
func TestServerEndsDuringARead(t *testing.T) {
	p := newPulling(t, 1, nil)
	release, done := p.held(context.Background(), t)
	if s := p.server.Stats(); s.Pinned == 0 {
		t.Error("nothing is pinned during a read")
	}
	check(t, p.server.Close())
	if s := p.server.Stats(); s.Pinned != 0 {
		t.Errorf("%d bytes are pinned after the server's end", s.Pinned)
	}
	p.from.nothingLeft()
	pooltest.Until(t, "the loss", func() bool { return p.client.Stats().Peers[0].State != "up" })
	select {
	case err := <-done:
		t.Fatalf("the fetch ended with %v during the read", err)
	default:
	}
	if s := p.to.Stats(); s.Partial == 0 {
		t.Error("the slot is free during the read")
	}
	release <- errors.New("the helper was killed")
	if err := <-done; !errors.Is(err, ErrLost) {
		t.Errorf("ended with %v, want lost", err)
	}
	p.to.nothingLeft()
}

// So it is when the caller gives up, and what arrives is stored nevertheless.
func TestCallerLeavesDuringARead(t *testing.T) {
	p := newPulling(t, 1, nil)
	ctx, leave := context.WithCancel(context.Background())
	release, done := p.held(ctx, t)
	leave()
	if s := p.to.Stats(); s.Partial == 0 {
		t.Error("the slot is free during the read")
	}
	release <- nil
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	p.to.nothingLeft()
	if !p.to.whole(0, chain("a", 1)) {
		t.Error("the block that arrived is not stored")
	}
}

// The client's Close waits for a read, too.
func TestClientClosesDuringARead(t *testing.T) {
	p := newPulling(t, 1, nil)
	release, done := p.held(context.Background(), t)
	closed := make(chan error)
	go func() { closed <- p.client.Close() }()
	release <- nil
	check(t, <-closed)
	<-done
	p.to.nothingLeft()
}

// answers returns the payload of the next frame but PINGs, which must be of a kind.
func answers(t *testing.T, c *conn, k kind) []byte {
	t.Helper()
	for {
		h, err := c.next()
		check(t, err)
		b, err := c.rest(int(h.length))
		check(t, err)
		if h.kind == k {
			return b
		}
		if h.kind != kindPing {
			t.Fatalf("kind %d (%q) instead of %d", h.kind, b, k)
		}
	}
}

// A PIN's blocks are pinned until UNPIN, or until the connection ends, and what is not stored is
// said to be missing.
func TestPinsEndWithTheConnection(t *testing.T) {
	p := newPulling(t, 1, nil)
	h := chain("a", 3)
	p.from.save(h.Slice(0, 2))
	c := connect(t, p.addr, testKey(t, 1))
	for id := range uint32(2) {
		m := get{space: p.from.spec.Fingerprint, length: 4096, hashes: h.Slice(int(id), int(id)+2)}
		check(t, c.send(kindPin, id, m.encode(nil)))
		got, err := parsePlaces(answers(t, c, kindPlaces))
		if err != nil || got.target != "server:1" || got.protocol != "tcp" || len(got.rows) != 2 ||
			got.rows[0].status != pool.OK || got.rows[0].address < serverBase {
			t.Fatalf("%+v, %v", got, err)
		}
		if want := [...]pool.Status{pool.OK, pool.Missing}[id]; got.rows[1].status != want {
			t.Errorf("the second block has status %d, want %d", got.rows[1].status, want)
		}
	}
	pooltest.Until(t, "three pinned blocks", func() bool { return p.server.Stats().Pinned == 3*4096 })
	check(t, c.send(kindUnpin, 0, nil))
	pooltest.Until(t, "one pinned block", func() bool { return p.server.Stats().Pinned == 4096 })
	check(t, c.raw.Close())
	pooltest.Until(t, "no pinned block", func() bool { return p.server.Stats().Pinned == 0 })
	p.from.nothingLeft()
}

// A block that the client may not read is not pinned: its bytes would count for no bound.
func TestPinsOfAnotherLength(t *testing.T) {
	p := newPulling(t, 1, nil)
	h := chain("a", 3)
	p.from.save(h)
	c := connect(t, p.addr, testKey(t, 1))
	m := get{space: p.from.spec.Fingerprint, length: 4095, hashes: h}
	check(t, c.send(kindPin, 1, m.encode(nil)))
	got, err := parsePlaces(answers(t, c, kindPlaces))
	if err != nil || len(got.rows) != 3 || got.rows[0].status != pool.Invalid {
		t.Fatalf("%+v, %v", got, err)
	}
	if s := p.from.Stats(); s.PinnedEntries != 0 {
		t.Errorf("%d blocks are pinned", s.PinnedEntries)
	}
	check(t, c.send(kindUnpin, 1, nil))
}

// PINs of nothing are bounded, too.
func TestEmptyPinsAreBounded(t *testing.T) {
	p := newPulling(t, 1, nil)
	p.from.save(chain("a", 1))
	c := connect(t, p.addr, testKey(t, 1))
	pin := func(id uint32, name string) placed {
		m := get{space: p.from.spec.Fingerprint, length: 4096, hashes: chain(name, 1)}
		check(t, c.send(kindPin, id, m.encode(nil)))
		got, err := parsePlaces(answers(t, c, kindPlaces))
		check(t, err)
		return got.outcome
	}
	for id := range uint32(maxPins) {
		if got := pin(id, "missing"); got != placedOK {
			t.Fatalf("PIN %d has outcome %d", id, got)
		}
	}
	for _, name := range []string{"missing", "a"} {
		if got := pin(maxPins, name); got != placedFull {
			t.Errorf("PIN %d of %q has outcome %d, want %d", maxPins, name, got, placedFull)
		}
	}
	check(t, c.send(kindUnpin, 0, nil))
	if got := pin(0, "a"); got != placedOK {
		t.Errorf("outcome %d after an UNPIN", got)
	}
}

// Nobody can pin twice under one id, or free what is not pinned.
func TestPinsThatBreakTheProtocol(t *testing.T) {
	p := newPulling(t, 1, nil)
	p.from.save(chain("a", 1))
	pin := (&get{space: p.from.spec.Fingerprint, length: 4096, hashes: chain("a", 1)}).encode(nil)
	c := connect(t, p.addr, testKey(t, 1))
	check(t, c.send(kindUnpin, 1, nil))
	answers(t, c, kindError)
	c = connect(t, p.addr, testKey(t, 1))
	check(t, c.send(kindPin, 1, pin))
	answers(t, c, kindPlaces)
	check(t, c.send(kindPin, 1, pin))
	if _, err := c.next(); err == nil {
		t.Error("two PINs have one id")
	}
	pooltest.Until(t, "no pinned block", func() bool { return p.server.Stats().Pinned == 0 })
}
