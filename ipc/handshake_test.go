package ipc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc/peercred"
)

// shake lets a client of one range of versions meet an agent of another.
func shake(t *testing.T, clientMin, clientMax, agentMin, agentMax uint32) (version uint32, clientErr, agentErr error) {
	t.Helper()
	l := listenSession(t, SessionOptions{})
	var wg sync.WaitGroup
	wg.Go(func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		var hello *Hello
		if hello, agentErr = ServeHandshake(c, Welcome{Boot: testBoot, Session: 9, MaxFrame: 1, LeaseBytes: 2},
			agentMin, agentMax); agentErr == nil {
			if hello.Software != "test" {
				t.Errorf("software %q", hello.Software)
			}
			agentErr = c.Send(&Pong{Req: c.Version()})
		}
	})
	c, w, clientErr := DialSession(t.Context(), l.o.Path, "test", clientMin, clientMax)
	wg.Wait()
	if clientErr != nil {
		return 0, clientErr, agentErr
	}
	defer c.Close()
	m, _, err := c.Recv()
	if err != nil || m.(*Pong).Req != w.Version || c.Version() != w.Version {
		t.Errorf("client %d to %d, agent %d to %d: %+v, %v, welcome %+v", clientMin, clientMax, agentMin, agentMax, m,
			err, w)
	}
	if w.Boot != testBoot || w.Session != 9 || w.LeaseBytes != 2 {
		t.Errorf("welcome %+v", w)
	}
	return w.Version, nil, agentErr
}

// TestHandshakeVersions expects ranges that do not overlap to be refused with both of them named.
func TestHandshakeVersions(t *testing.T) {
	for _, v := range []struct{ clientMin, clientMax, agentMin, agentMax, want uint32 }{
		{Version, Version, MinVersion, Version, Version},
		{1, Version, MinVersion, Version, Version},           // a client that speaks older ones, too
		{Version, Version, 1, Version, Version},              // an agent that does
		{Version, Version + 6, MinVersion, Version, Version}, // a newer client that still speaks ours
	} {
		got, clientErr, agentErr := shake(t, v.clientMin, v.clientMax, v.agentMin, v.agentMax)
		if got != v.want || clientErr != nil || agentErr != nil {
			t.Errorf("%+v: version %d, client %v, agent %v", v, got, clientErr, agentErr)
		}
	}
	for _, v := range []struct{ clientMin, clientMax, agentMin, agentMax uint32 }{
		{Version + 1, Version + 2, MinVersion, Version}, // too new
		{1, MinVersion - 1, MinVersion, Version},        // too old
	} {
		_, clientErr, agentErr := shake(t, v.clientMin, v.clientMax, v.agentMin, v.agentMax)
		var e *Error
		if !errors.As(clientErr, &e) || e.Code != ErrCodeVersion {
			t.Errorf("%+v: client %v, want ERROR version", v, clientErr)
		}
		if want := fmt.Sprintf("%d to %d, allowed is %d to %d", v.clientMin, v.clientMax, v.agentMin,
			v.agentMax); agentErr == nil || !strings.Contains(agentErr.Error(), want) ||
			!strings.Contains(e.Text, want) {
			t.Errorf("%+v: agent %v, text %q, want both ranges in them", v, agentErr, e.Text)
		}
	}
}

// TestHandshakeNoHello expects an error that says so for a peer that does not begin with HELLO.
func TestHandshakeNoHello(t *testing.T) {
	for name, first := range map[string][]byte{"another message": frameOf(&Ping{Req: 1}),
		"nonsense": {0, 0, 0, 1, 0xc0}, "huge": {0xff, 0, 0, 0}} {
		agent, raw := rawPair(t)
		raw.Write(first)
		if _, err := ServeHandshake(agent, Welcome{}, MinVersion, Version); err == nil {
			t.Errorf("%s: accepted", name)
		}
		client, err := newConn(raw, false)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		m, _, err := client.Recv()
		if e, ok := m.(*Error); !ok || e.Code != ErrCodeMalformed {
			t.Errorf("%s: told %+v, %v, want ERROR malformed", name, m, err)
		}
	}
}

// Peers who are on neither list are refused with a reason; a group opens the door as well as a
// user.
func TestSessionPermission(t *testing.T) {
	me, mine := uint32(os.Geteuid()), uint32(os.Getegid())
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	type list = []uint32
	for name, v := range map[string]struct {
		uids, gids list
		ok         bool
	}{
		"by default": {nil, nil, true}, "uid": {list{me}, nil, true}, "gid": {list{}, list{mine},
			true}, "other uid": {list{me + 12345}, nil, false},
		"other gid": {nil, list{mine + 12345}, false}, "one of two": {list{me + 12345}, list{mine}, true},
	} {
		checkPermission(t, name, v.uids, v.gids, v.ok)
	}
	for _, g := range groups {
		checkPermission(t, fmt.Sprint("supplementary group ", g), nil, list{uint32(g)}, true)
	}
}

func checkPermission(t *testing.T, name string, uids, gids []uint32, ok bool) {
	t.Helper()
	refused := make(chan peercred.Cred, 1)
	l := listenSession(t, SessionOptions{
		UIDs: uids, GIDs: gids, OnRefused: func(p peercred.Cred, _ error) { refused <- p },
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			ServeHandshake(c, Welcome{}, MinVersion, Version)
			c.Close()
		}
	})
	c, _, err := DialSession(t.Context(), l.o.Path, "test", MinVersion, Version)
	if ok {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			c.Close()
		}
	} else {
		var e *Error
		if !errors.As(err, &e) || e.Code != ErrCodePermission || !strings.Contains(e.Text, "allowed are uids") {
			t.Errorf("%s: %v, want ERROR permission", name, err)
		}
		select {
		case p := <-refused:
			if p.Uid != uint32(os.Geteuid()) {
				t.Errorf("%s: refused %+v", name, p)
			}
		case <-time.After(testTimeout):
			t.Errorf("%s: no peer was refused", name)
		}
	}
	l.Close()
	wg.Wait()
}

func TestPeerGroups(t *testing.T) {
	p := peercred.Cred{Gid: 5, Groups: []uint32{7, 9}}
	for gid, want := range map[uint32]bool{5: true, 7: true, 9: true, 8: false} {
		if p.InGroups([]uint32{1, gid}) != want {
			t.Errorf("group %d: want %v", gid, want)
		}
	}
	agent, _ := rawPair(t)
	groups, _ := os.Getgroups()
	for _, g := range groups {
		if !slices.Contains(agent.Peer().Groups, uint32(g)) {
			t.Errorf("group %d is not in %v", g, agent.Peer().Groups)
		}
	}
}
