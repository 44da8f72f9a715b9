package connlimit

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// room is a limit, and the connections in it by name.
type room struct {
	*Limit
	places map[string]*Place
	gone   []string
}

func newRoom(places, kept int) *room {
	return &room{Limit: New(places, kept), places: map[string]*Place{}}
}

// enter takes a place and returns the connection that gave way, "refused", or "".
func (r *room) enter(owner Owner, name string) string {
	r.gone = nil
	p, err := r.Enter(owner, func() { r.gone = append(r.gone, name) })
	if err != nil {
		return "refused"
	}
	r.places[name] = p
	if len(r.gone) == 0 {
		return ""
	}
	return r.gone[0]
}

func (r *room) fill(owner Owner, n int, s State) {
	for range n {
		name := fmt.Sprint(owner.Name, " ", r.of[owner.Name])
		r.enter(owner, name)
		if p := r.places[name]; p != nil {
			p.Set(s)
		}
	}
}

// TestSomeConnectionsAreNoGreed: a host that opens several connections at once loses none of them
// to itself while others hold all places with one each.
func TestSomeConnectionsAreNoGreed(t *testing.T) {
	r := newRoom(32, 8)
	for i := range uint32(24) {
		r.fill(User(100+i, 1), 1, Idle)
	}
	for i := range 4 {
		want := fmt.Sprintf("uid %d 0", 100+i)
		if gone := r.enter(User(7, 1), fmt.Sprint("newcomer ", i)); gone != want {
			t.Errorf("for connection %d of one host %q gave way, want %q", i, gone, want)
		}
	}
}

// TestOwnersShare: whoever holds most gives way, the oldest first, and those for whom places are
// kept always find one.
func TestOwnersShare(t *testing.T) {
	agent, root := User(1000, 1000), User(0, 1000)
	a, b, c := User(1, 1000), User(2, 1000), User(3, 1000)
	type fill struct {
		owner Owner
		n     int
		s     State
	}
	for name, play := range map[string]struct {
		fills []fill
		who   Owner
		want  string
	}{
		"room is left":                   {[]fill{{a, 5, Held}}, b, ""},
		"a flood takes its own places":   {[]fill{{a, 6, Idle}}, a, "uid 1 0"},
		"and those that are held stay":   {[]fill{{a, 6, Held}}, a, "refused"},
		"the idle ones first":            {[]fill{{a, 4, Busy}, {a, 2, Idle}}, a, "uid 1 4"},
		"then the busy ones":             {[]fill{{a, 6, Busy}}, a, "uid 1 0"},
		"a flood gives way to another":   {[]fill{{b, 1, Idle}, {a, 5, Idle}}, c, "uid 1 0"},
		"also if all of it is held":      {[]fill{{b, 1, Idle}, {a, 5, Held}}, c, "uid 1 0"},
		"and to one that has fewer":      {[]fill{{b, 1, Held}, {a, 5, Held}}, b, "uid 1 0"},
		"not to one that has as many":    {[]fill{{b, 3, Held}, {a, 3, Held}}, b, "refused"},
		"the agent's user has places":    {[]fill{{a, 9, Held}}, agent, ""},
		"so has root":                    {[]fill{{a, 9, Held}}, root, ""},
		"the agent's user gets more":     {[]fill{{root, 2, Held}, {a, 6, Held}}, agent, "uid 1 0"},
		"kept places that are held stay": {[]fill{{agent, 8, Held}, {a, 9, Idle}}, b, "refused"},
		"and no other owner gets any":    {[]fill{{agent, 8, Idle}}, b, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoom(8, 2)
			for _, f := range play.fills {
				r.fill(f.owner, f.n, f.s)
			}
			if got := r.enter(play.who, "newcomer"); got != play.want {
				t.Errorf("%q gave way, want %q", got, play.want)
			}
			if n := r.Taken(); n > 8 {
				t.Errorf("%d places are taken", n)
			}
		})
	}
}

// TestManyOwners: of owners with one place each, the oldest that is not in use gives way, so that
// one who has many addresses keeps nobody out either, and those in use stay.
func TestManyOwners(t *testing.T) {
	r := newRoom(16, 0)
	for i := range uint32(16) {
		r.fill(User(i+1, 1000), 1, []State{Held, Idle}[min(i, 1)])
	}
	if got := r.enter(User(99, 1000), "newcomer"); got != "uid 2 0" {
		t.Errorf("%q gave way", got)
	}
	for _, p := range r.places {
		p.Set(Held)
	}
	if got := r.enter(User(98, 1000), "newcomer"); got != "refused" {
		t.Errorf("%q gave way", got)
	}
}

// TestLeave: a place is free after Leave, once.
func TestLeave(t *testing.T) {
	r := newRoom(2, 0)
	a, b := User(1, 1000), User(2, 1000)
	r.fill(a, 2, Idle)
	if got := r.enter(b, "b"); got != "uid 1 0" {
		t.Fatalf("%q gave way", got)
	}
	r.places["uid 1 0"].Leave() // it had to give way already
	r.places["b"].Leave()
	r.places["b"].Leave()
	if n := r.Taken(); n != 1 {
		t.Errorf("%d places are taken, want 1", n)
	}
}

// TestHosts: addresses of one host are one owner, and ports do not count.
func TestHosts(t *testing.T) {
	var got []string
	for _, a := range []string{
		"10.0.0.1:1", "10.0.0.1:2", "[::ffff:10.0.0.1]:1", "10.0.0.2:1", "[fd00::1]:1", "[fd00::2]:1",
		"[fd00:0:0:1::1]:1",
	} {
		got = append(got, Host(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(a))).Name)
	}
	want := []string{
		"10.0.0.1/32", "10.0.0.1/32", "10.0.0.1/32", "10.0.0.2/32", "fd00::/64", "fd00::/64", "fd00:0:0:1::/64",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestUsers: the owner of a connection to a Unix socket is the user of the process that made it.
func TestUsers(t *testing.T) {
	l, err := net.Listen("unix", fmt.Sprintf("@kvagent-connlimit-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	of := func(connect func() error) Owner {
		t.Helper()
		if err := connect(); err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return Of(c)
	}
	dial := func() error {
		c, err := net.Dial("unix", l.Addr().String())
		if err == nil {
			err = c.Close()
		}
		return err
	}
	if got, want := of(dial), (Owner{fmt.Sprint("uid ", os.Geteuid()), true}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if os.Geteuid() != 0 {
		t.Skip("another user is played by root alone")
	}
	as := func() error { // on a thread of its own, which ends with the goroutine
		ended := make(chan error)
		go func() {
			runtime.LockOSThread()
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 12345, 12345, 12345); errno != 0 {
				ended <- errno
				return
			}
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err == nil {
				err = errors.Join(unix.Connect(fd, &unix.SockaddrUnix{Name: l.Addr().String()}), unix.Close(fd))
			}
			ended <- err
		}()
		return <-ended
	}
	if got, want := of(as), (Owner{"uid 12345", false}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
