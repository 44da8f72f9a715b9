// Package connlimit bounds the connections of a listener, and shares the places among those who
// connect, so that none of them keeps the others out.
//
//	┌──────────────── places ────────────────┐
//	│ everybody                  │ kept      │   A newcomer to a full room takes the place of the
//	│ u1 u1 u1 u1 u1 u2 u2 u3 u1 │ own  own  │   owner who holds most, or is refused if that is
//	└────────────────────────────────────────┘   the newcomer itself and all its own are held.
package connlimit

import (
	"container/list"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Owner is who makes a connection: a user of this node, or a host.
type Owner struct {
	Name string
	Kept bool // the places that are kept are for this one, too
}

// User returns the owner of the connections of a user of this node. Places are kept for root and
// for the user of this process.
func User(uid, own uint32) Owner {
	return Owner{Name: "uid " + strconv.FormatUint(uint64(uid), 10), Kept: uid == 0 || uid == own}
}

// Of returns the owner of a connection: the user of its process, as the kernel names it, or its
// address.
func Of(c net.Conn) Owner {
	u, is := c.(*net.UnixConn)
	if !is {
		return Host(c.RemoteAddr())
	}
	o := Owner{Name: "a user that is not known"}
	raw, err := u.SyscallConn()
	if err != nil {
		return o
	}
	_ = raw.Control(func(fd uintptr) { // fails when it is closed
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			o = User(cred.Uid, uint32(os.Geteuid()))
		}
	})
	return o
}

// Host returns the owner of the connections of an address: the address itself, or, of IPv6, its
// network of 64 bits, all of which one host can have.
func Host(a net.Addr) Owner {
	if a == nil {
		return Owner{}
	}
	to, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return Owner{Name: a.String()}
	}
	ip, bits := to.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	network, err := ip.Prefix(bits)
	if err != nil {
		return Owner{Name: ip.String()}
	}
	return Owner{Name: network.String()}
}

// Limit is the places of a listener. Its methods may be called from any goroutine.
type Limit struct {
	places int // in all
	common int // of them, that are not kept

	mu    sync.Mutex
	taken *list.List // of *Place, the oldest first
	of    map[string]int
	kept  int // places of owners for whom some are kept
}

// greedy is the divisor of a limit's places that gives how many connections an owner may hold
// before it counts as one that has more than others: an agent opens some at once.
const greedy = 8

// State is what a connection is doing. Of one owner's, those in an earlier state give way first.
type State uint8

// The states. A connection begins Idle.
const (
	Idle State = iota // it has asked for nothing
	Busy              // it is being served
	Held              // it is to last: it gives way to no other connection of its owner
)

// New returns a limit of places, of which kept are for the owners that they are kept for.
func New(places, kept int) *Limit {
	return &Limit{places: places, common: max(places-kept, 1), taken: list.New(), of: map[string]int{}}
}

// ForUsers returns the limit of a Unix socket, an eighth of whose places is kept for the user of
// this process and for root: probes run as these.
func ForUsers(places int) *Limit { return New(places, places/8) }

// Place is one connection's.
type Place struct {
	limit *Limit
	owner Owner
	close func()
	state State
	at    *list.Element // nil: it was left, or had to give way
}

// Enter takes a place for a connection, which close ends. If there is none, a connection of the
// owner with most gives way, where all with at most an eighth of the places count alike: the oldest
// in the earliest state. One that is held gives way only if its owner has more than that, and to an
// owner with fewer. Enter calls its close then, and counts it no more. The error says what is
// allowed.
func (l *Limit) Enter(owner Owner, closeConn func()) (*Place, error) {
	p := &Place{limit: l, owner: owner, close: closeConn}
	gone, err := l.enter(p)
	if gone != nil {
		gone.close()
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (l *Limit) enter(p *Place) (gone *Place, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.taken.Len(); n >= l.places || !p.owner.Kept && n-l.kept >= l.common {
		if gone = l.victim(p.owner); gone == nil {
			return nil, fmt.Errorf("%d of %s, allowed: %d of all, of which %d are kept for the agent's user and root, "+
				"or known hosts", l.of[p.owner.Name], p.owner.Name, l.places, l.places-l.common)
		}
		l.remove(gone)
	}
	p.at = l.taken.PushBack(p)
	l.of[p.owner.Name]++
	if p.owner.Kept {
		l.kept++
	}
	return gone, nil
}

// victim returns the place that gives way to a newcomer; nil: none does.
func (l *Limit) victim(newcomer Owner) (best *Place) {
	fair := l.places / greedy // up to which all owners count alike
	own, most := max(l.of[newcomer.Name]+1, fair), 0
	for e := l.taken.Front(); e != nil; e = e.Next() {
		p := e.Value.(*Place)
		n := max(l.of[p.owner.Name], fair)
		if p.owner.Name == newcomer.Name {
			n = own
		}
		switch {
		case p.owner.Kept && !newcomer.Kept || n < own:
			continue
		case p.state == Held && (n <= own || n*greedy <= l.places):
			continue
		}
		if best == nil || n > most || n == most && p.state < best.state {
			best, most = p, n
		}
	}
	return best
}

func (l *Limit) remove(p *Place) {
	l.taken.Remove(p.at)
	p.at = nil
	if l.of[p.owner.Name]--; l.of[p.owner.Name] == 0 {
		delete(l.of, p.owner.Name)
	}
	if p.owner.Kept {
		l.kept--
	}
}

// Set says what the connection is doing from now on.
func (p *Place) Set(s State) {
	p.limit.mu.Lock()
	defer p.limit.mu.Unlock()
	p.state = s
}

// Leave gives the place back, if it was not taken away. It may be called more than once.
func (p *Place) Leave() {
	p.limit.mu.Lock()
	defer p.limit.mu.Unlock()
	if p.at != nil {
		p.limit.remove(p)
	}
}

// Taken returns the number of connections.
func (l *Limit) Taken() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken.Len()
}

// Held returns the number of connections that are held.
func (l *Limit) Held() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for e := l.taken.Front(); e != nil; e = e.Next() {
		if e.Value.(*Place).state == Held {
			n++
		}
	}
	return n
}
