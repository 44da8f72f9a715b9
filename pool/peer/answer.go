package peer

import (
	"net"
	"time"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer/seal"
)

// answer answers GETs and PINs, in their order, until the connection ends. After a failed write it
// drops them: the reader waits for room in v.gets, and finds the end only when it reads on.
func (v *served) answer() {
	failed := false
	for {
		select {
		case r := <-v.gets:
			if failed {
				continue
			}
			send := v.sendBlocks
			if r.pin {
				send = v.sendPlaces
			}
			if err := send(&r); err != nil {
				_ = v.raw.Close() // its reader counts why
				failed = true
			}
		case <-v.ended:
			return
		}
	}
}

// answer is what a GET gets. Its slots are pinned until release.
type answer struct {
	rows   []row
	held   []pool.Slot
	status []pool.Status // of held, for Release
	send   []int         // of held: what is sent, in the order of the rows
	bytes  int64         // of what is sent
}

// sendBlocks answers one GET. The blocks are pinned only while they are sent.
func (v *served) sendBlocks(r *request) error {
	a := v.acquire(r)
	defer func() { v.server.cfg.Slots.Release(a.held, a.status) }()
	start := time.Now()
	err := v.writeBlocks(r.id, a)
	if err == nil {
		v.tally(a, time.Since(start))
	}
	return err
}

// acquire pins the blocks of a GET and decides which are sent.
func (v *served) acquire(r *request) *answer {
	n := r.hashes.N
	a := &answer{rows: make([]row, n)}
	b := pool.Batch{
		Group: r.group, Shard: r.shard, Hashes: r.hashes,
		Status: make([]pool.Status, n), Slots: make([]pool.Slot, n),
	}
	var ok bool
	if b.Space, _, ok = v.server.cfg.Resolve(r.space); !ok {
		for i := range a.rows {
			a.rows[i].status = pool.Missing
		}
		return a
	}
	v.server.cfg.Slots.Acquire(&b)
	for i, status := range b.Status {
		if status == pool.OK {
			a.rows[i] = v.hold(a, r, i, b.Slots[i])
			continue
		}
		if status != pool.Corrupt && status != pool.Invalid {
			status = pool.Missing
		}
		a.rows[i].status = status
	}
	return a
}

// hold adds a pinned slot to an answer, and returns its row.
func (v *served) hold(a *answer, r *request, i int, s pool.Slot) row {
	out := row{pool.OK, s.Sum}
	end := pool.OK
	if s.Len != r.length {
		out = row{status: pool.Invalid}
	} else if v.server.cfg.NoSums {
		key := pool.Key{Space: r.space, Group: r.group, Shard: r.shard, Hash: pool.MakeHash(r.hashes.At(i))}
		mem := v.memory(s)
		if pagefault.Guard(mem, nil, func() { out.sum = pool.Sum(key.Seed(s.Len), mem) }) != nil {
			v.server.cfg.Slots.Probe(s)
			out, end = row{status: pool.Corrupt}, pool.Corrupt
		}
	}
	if out.status == pool.OK {
		a.send = append(a.send, len(a.held))
		a.bytes += int64(s.Len)
	}
	a.held, a.status = append(a.held, s), append(a.status, end)
	return out
}

func (v *served) memory(s pool.Slot) []byte { return v.server.cfg.Arena[s.Off : s.Off+int64(s.Len)] }

func (v *served) tally(a *answer, took time.Duration) {
	v.server.count.add(func(c *ServerStats) {
		c.Blocks, c.Bytes = c.Blocks+uint64(len(a.send)), c.Bytes+uint64(a.bytes)
		c.Seconds += took.Seconds()
	})
}

// writeBlocks writes a BLOCKS. A part of a slot that cannot be read is sent as zeros, which the
// client finds not to match the block's sum; the slot is released as corrupt.
func (v *served) writeBlocks(id uint32, a *answer) error {
	v.writing.Lock()
	defer v.writing.Unlock()
	after := int64(0)
	for k := range a.send {
		after += seal.Sealed(int64(a.slot(k).Len))
	}
	v.until = time.Now().Add(v.timeout + atLeastRate(after))
	defer func() { v.until = time.Time{} }()
	v.seal(kindBlocks, id, encodeTable(nil, a.rows), after)
	out := &gather{conn: v.conn}
	err := out.add(v.frame)
	for k := range a.send {
		for mem := v.memory(a.slot(k)); len(mem) > 0 && err == nil; {
			n := min(len(mem), seal.Part)
			err = v.writeSealed(out, a, k, mem[:n])
			mem = mem[n:]
		}
	}
	if err == nil {
		err = out.flush()
	}
	if err != nil {
		return writeError(err, v.timeout)
	}
	return nil
}

// slot returns the slot that is sent as number k.
func (a *answer) slot(k int) pool.Slot { return a.held[a.send[k]] }

// writeSealed writes a part of slot k of an answer, and its tag. Where the kernel reads slots
// itself, and the part can be read, nothing is copied here. A page that is lost after that ends the
// connection.
func (v *served) writeSealed(out *gather, a *answer, k int, mem []byte) error {
	if v.direct {
		var tag []byte
		if pagefault.Guard(mem, nil, func() { tag = v.out.Tag(nil, mem) }) == nil {
			return out.add(mem, tag)
		}
		v.out.Back()
	}
	if err := out.flush(); err != nil {
		return err
	}
	if v.copied == nil {
		v.copied = make([]byte, seal.Part+macBytes)
	}
	b := v.copied[:len(mem)]
	if pagefault.Guard(mem, nil, func() { copy(b, mem) }) != nil {
		clear(b)
		v.server.cfg.Slots.Probe(a.slot(k))
		a.status[a.send[k]] = pool.Corrupt
	}
	return v.writeAll(v.out.Tag(b, b))
}

// gather collects what is written by one vectored system call, which copies from the arena into the
// kernel: about seal.Part bytes, which are still in the processor's cache then.
type gather struct {
	*conn
	parts net.Buffers
	bytes int
}

func (g *gather) add(parts ...[]byte) error {
	for _, b := range parts {
		g.parts, g.bytes = append(g.parts, b), g.bytes+len(b)
	}
	if g.bytes < seal.Part {
		return nil
	}
	return g.flush()
}

func (g *gather) flush() error {
	if len(g.parts) == 0 {
		return nil
	}
	if err := g.limitWrite(); err != nil {
		return err
	}
	left := g.parts
	_, err := left.WriteTo(g.raw)
	g.parts, g.bytes = g.parts[:0], 0
	return err
}
