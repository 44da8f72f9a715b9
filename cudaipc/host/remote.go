package host

import (
	"fmt"
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// Limits of one call of process_vm_readv or process_vm_writev.
const (
	remoteVectors = 1024      // IOV_MAX
	remotePiece   = 256 << 10 // bytes: what was just copied is still in the second-level cache when it is summed
)

// piece is what one call moves.
type piece struct {
	local  []unix.Iovec
	remote []unix.RemoteIovec
	bytes  int
}

// remote moves runs between the peer's process and the arena, a piece at a time, the sum right
// beside it. It is the fall-back for memory that has no descriptor. In a profile of it the kernel's
// copy is three fifths, the pinning of each page one fifth, and the sum, which is a pass of its own
// here, another: larger calls save none of these. It is half as fast as copy(), where mapped
// regions are as fast.
func (s *stream) remote(r *cudaipc.Opened, dir cudaipc.Direction, runs []cudaipc.Run, sum uint32, sums bool) (uint32,
	error) {
	var v piece
	for i := range runs {
		run := &runs[i]
		here := s.arena[run.ArenaOff : run.ArenaOff+int64(run.Len)]
		addr := uintptr(r.Addr + run.RegionOff)
		for len(here) > 0 {
			n := min(len(here), remotePiece-v.bytes)
			v.add(here[:n], addr)
			here, addr = here[n:], addr+uintptr(n)
			if v.full() {
				var err error
				if sum, err = s.flush(&v, dir, sum, sums); err != nil {
					return sum, err
				}
			}
		}
	}
	return s.flush(&v, dir, sum, sums)
}

func (v *piece) add(here []byte, addr uintptr) {
	local := unix.Iovec{Base: &here[0]}
	local.SetLen(len(here))
	v.local = append(v.local, local)
	v.remote = append(v.remote, unix.RemoteIovec{Base: addr, Len: len(here)})
	v.bytes += len(here)
}

func (v *piece) full() bool { return v.bytes == remotePiece || len(v.remote) == remoteVectors }

// flush does one call. A call that moved less than it should is an error: the rest of the peer's
// range is not there (any more). The peer's process id is trusted only as long as its pidfd says
// that it lives; what was read around its death is not.
func (s *stream) flush(v *piece, dir cudaipc.Direction, sum uint32, sums bool) (uint32, error) {
	if v.bytes == 0 {
		return sum, nil
	}
	p := s.peer
	if p.Dead() {
		return sum, cudaipc.ErrPeerDead
	}
	call := unix.ProcessVMReadv
	if dir == cudaipc.Scatter {
		call = unix.ProcessVMWritev
	}
	n, err := call(p.Pid, v.local, v.remote, 0)
	if p.Dead() {
		return sum, cudaipc.ErrPeerDead
	}
	if err != nil || n != v.bytes {
		return sum, fmt.Errorf("%d of %d bytes moved to or from process %d: %w", max(n, 0), v.bytes, p.Pid, reason(err))
	}
	if sums {
		if err := pagefault.Guard(s.arena, nil, func() { sum = v.sum(sum) }); err != nil {
			return sum, err
		}
	}
	v.local, v.remote, v.bytes = v.local[:0], v.remote[:0], 0
	return sum, nil
}

// sum goes over the arena's side of a piece, for both directions.
func (v *piece) sum(state uint32) uint32 {
	for i := range v.local {
		state = crc32.Update(state, cudaipc.Castagnoli, iovecBytes(&v.local[i]))
	}
	return state
}

func reason(err error) error {
	if err == nil {
		return unix.EFAULT // a partial transfer does not say why
	}
	return err
}

func iovecBytes(v *unix.Iovec) []byte { return unsafe.Slice(v.Base, int(v.Len)) }
