package peer

import (
	"errors"
	"net"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
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
			v.probe(s)
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

func (v *served) probe(s pool.Slot) {
	if v.prober != nil {
		v.prober.Probe(s)
	}
}

func (v *served) tally(a *answer, took time.Duration) {
	for _, r := range a.rows {
		if r.status != pool.OK {
			v.server.count.notSent[reasonOf(r.status)].Add(1)
		}
	}
	v.server.peers.add(v.host, len(a.send), a.bytes, took)
}

// writeBlocks writes a BLOCKS. A slot of which a page cannot be read is sent as zeros from there
// on, which the client finds not to match its sum; it is released as corrupt.
func (v *served) writeBlocks(id uint32, a *answer) (err error) {
	table := encodeTable(nil, a.rows)
	v.writing.Lock()
	defer v.writing.Unlock()
	v.seal(kindBlocks, id, uint32(int64(len(table))+a.bytes), table)
	if v.direct {
		err = v.writeDirect(a)
	} else if err = v.writeAll(v.frame); err == nil {
		for k := range a.send {
			if err = v.writeCopied(a, k, v.memory(a.slot(k))); err != nil {
				break
			}
		}
	}
	if err != nil {
		return writeError(err, v.timeout)
	}
	return nil
}

// slot returns the slot that is sent as number k.
func (a *answer) slot(k int) pool.Slot { return a.held[a.send[k]] }

// writeDirect writes the frame and the slots by vectored system calls, which copy from the arena
// into the kernel.
func (v *served) writeDirect(a *answer) error {
	rest, k, at := v.frame, 0, int64(0) // the next byte is at of slot k, after rest
	for len(rest) > 0 || k < len(a.send) {
		part, owner, room := net.Buffers{}, []int{}, int64(writePart)
		if len(rest) > 0 {
			part, owner, room = append(part, rest), append(owner, -1), room-int64(len(rest))
			rest = nil
		}
		for k < len(a.send) && room > 0 {
			n := min(int64(a.slot(k).Len)-at, room)
			part, owner = append(part, v.memory(a.slot(k))[at:at+n]), append(owner, k)
			if at, room = at+n, room-n; at == int64(a.slot(k).Len) {
				k, at = k+1, 0
			}
		}
		if err := v.raw.SetWriteDeadline(time.Now().Add(v.timeout)); err != nil {
			return err
		}
		left := part
		_, err := left.WriteTo(v.raw)
		if errors.Is(err, syscall.EFAULT) {
			owner = owner[len(owner)-len(left):]
			for i, mem := range left {
				if err = v.writeCopied(a, owner[i], mem); err != nil {
					return err
				}
			}
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyPart is what is copied at once where the kernel does not read slots itself, bytes.
const copyPart = 64 << 10

// writeCopied writes memory of slot k of an answer through a copy. Bytes that cannot be read
// become zeros. k is -1 for memory that is no slot's.
func (v *served) writeCopied(a *answer, k int, mem []byte) error {
	if v.copied == nil {
		v.copied = make([]byte, copyPart)
	}
	for len(mem) > 0 {
		n := min(len(mem), copyPart)
		if pagefault.Guard(mem, nil, func() { copy(v.copied, mem[:n]) }) != nil {
			clear(v.copied)
			if k >= 0 {
				v.probe(a.slot(k))
				a.status[a.send[k]] = pool.Corrupt
			}
		}
		if err := v.writeAll(v.copied[:n]); err != nil {
			return err
		}
		mem = mem[n:]
	}
	return nil
}
