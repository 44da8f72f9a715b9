package peer

import (
	"errors"
	"syscall"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer/seal"
)

// ask is one GET, or PIN: a shard of some blocks of a fetch, for each of which a slot is reserved.
// The stream's reader, or the goroutine of a one-sided read, alone touches the slots and the
// results, until it hands the ask back.
type ask struct {
	id     uint32
	fetch  *fetch
	get    get
	pin    bool          // a PIN instead of the GET: the blocks are read by one-sided reads
	parts  []*part       // of each block of the GET
	result []pool.Status // of each; Cancelled until it has arrived
}

// cancelled is the result of what did not arrive.
const cancelled = pool.Status(255)

// badPage is the result of a block whose slot cannot be written.
const badPage = pool.Status(254)

func (a *ask) bytes() int64 { return int64(len(a.parts)) * int64(a.get.length) }

// slot returns the slot of block i.
func (a *ask) slot(i int) *pool.Slot { return &a.parts[i].slots[a.get.shard] }

// seed returns what the sum of block i begins with.
func (a *ask) seed(i int) uint32 {
	key := pool.Key{
		Space: a.get.space, Group: a.get.group, Shard: a.get.shard, Hash: pool.MakeHash(a.get.hashes.At(i)),
	}
	return key.Seed(a.get.length)
}

// receiveBlocks reads a BLOCKS, which must answer the oldest ask, straight into the slots.
func (s *stream) receiveBlocks(h header) error {
	a := s.oldest()
	if a == nil || a.id != h.id || a.pin {
		return malformed("BLOCKS %d was not asked for", h.id)
	}
	head := tableBytes + len(a.parts)*rowBytes + macBytes
	if int(h.length) < head {
		return malformed("BLOCKS of %d bytes for %d blocks", h.length, len(a.parts))
	}
	b, err := s.rest(head)
	if err != nil {
		return err
	}
	rows, err := parseTable(b, nil)
	if err != nil {
		return err
	}
	if len(rows) != len(a.parts) {
		return malformed("BLOCKS: a table of %d blocks, not of %d", len(rows), len(a.parts))
	}
	total := int64(head)
	for _, r := range rows {
		if r.status == pool.OK {
			total += seal.Sealed(int64(a.get.length))
		}
	}
	if total != int64(h.length) {
		return malformed("BLOCKS of %d bytes, must be %d", h.length, total)
	}
	for i := range rows {
		if a.result[i] = rows[i].status; rows[i].status != pool.OK {
			continue
		}
		a.result[i] = cancelled
		if a.result[i], err = s.receiveBlock(a, i, rows[i].sum); err != nil {
			a.result[i] = cancelled
			return err
		}
	}
	s.answered(a)
	return nil
}

// receiveBlock reads the bytes of one block into its slot, and verifies and sums them there. An
// error is the connection's.
func (s *stream) receiveBlock(a *ask, i int, want uint32) (pool.Status, error) {
	cfg := &s.link.client.cfg
	slot := a.slot(i)
	mem := cfg.Arena[slot.Off : slot.Off+int64(slot.Len)]
	slot.Sum = a.seed(i)
	for len(mem) > 0 {
		n := min(len(mem), seal.Part)
		taken, bad, err := s.receivePart(mem[:n], &slot.Sum)
		if err != nil {
			return cancelled, err
		}
		if bad {
			cfg.Slots.Probe(*slot)
			s.in.Skip(seal.Parts(int64(len(mem))))
			return badPage, s.discard(seal.Sealed(int64(len(mem))) - int64(taken))
		}
		mem = mem[n:]
	}
	if slot.Sum != want {
		return pool.Corrupt, nil
	}
	return pool.OK, nil
}

// receivePart reads a part of a block into memory of the arena, and its tag, and verifies and sums
// what is there then. It returns bad if a page cannot be written or read; then taken bytes of the
// part have been taken off the stream, and the part is not counted.
func (s *stream) receivePart(mem []byte, sum *uint32) (taken int, bad bool, err error) {
	for taken < len(mem) {
		n, bad, err := s.into(mem[taken:])
		taken += n
		if bad || err != nil {
			return taken, bad, err
		}
	}
	if err := s.readFull(s.mac[:]); err != nil {
		return taken, false, err
	}
	if pagefault.Guard(mem, nil, func() {
		err = s.verify(mem, s.mac[:])
		*sum = pool.Sum(*sum, mem)
	}) != nil {
		s.in.Back()
		return taken + macBytes, true, nil
	}
	return taken, false, err
}

// into reads some bytes into memory of the arena. It returns bad if a page cannot be written; n
// bytes have been taken off the stream.
func (s *stream) into(mem []byte) (n int, bad bool, err error) {
	if s.direct {
		if n, err = s.read(mem, s.due); err != nil {
			return 0, errors.Is(err, syscall.EFAULT), notFault(err)
		}
	} else {
		if s.bounce == nil {
			s.bounce = make([]byte, copyPart)
		}
		if n, err = s.read(s.bounce[:min(len(mem), copyPart)], s.due); err != nil {
			return 0, false, err
		}
		bad = pagefault.Guard(mem[:n], nil, func() { copy(mem, s.bounce[:n]) }) != nil
	}
	return n, bad, nil
}

// notFault returns err, or nil for the error of a system call about the memory it was given.
func notFault(err error) error {
	if errors.Is(err, syscall.EFAULT) {
		return nil
	}
	return err
}

// copyPart is what is read at once where the kernel does not write to slots itself, bytes.
const copyPart = 64 << 10

// discard reads n bytes that have no place.
func (s *stream) discard(n int64) error {
	if s.bounce == nil {
		s.bounce = make([]byte, copyPart)
	}
	for n > 0 {
		k := min(n, int64(copyPart))
		if err := s.readFull(s.bounce[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}
