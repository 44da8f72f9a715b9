package ipc

import (
	"testing"
)

// ended reports whether a channel of Unserved is closed; nil counts as closed.
func ended(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return c == nil
	}
}

// A frame of the peer is unserved from the moment that its Send has returned until the reader
// says that it was served, or asks for more; half a frame is, too.
func TestUnserved(t *testing.T) {
	agent, client := sessionPair(t)
	if agent.Unserved() != nil {
		t.Error("something is unserved before anything was sent")
	}
	for range 2 {
		if err := client.Send(&Ping{Req: 1}); err != nil {
			t.Fatal(err)
		}
	}
	sent := agent.Unserved()
	if ended(sent) {
		t.Error("what was sent is served before it was received")
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	agent.Served()
	if ended(sent) || ended(agent.Unserved()) {
		t.Error("the second message counts as served with the first")
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	if ended(sent) || ended(agent.Unserved()) {
		t.Error("a message counts as served when it was received")
	}
	agent.Served()
	if !ended(sent) || agent.Unserved() != nil {
		t.Error("what was served counts as unserved")
	}
	if err := client.Send(&Ping{Req: 1}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	sent = agent.Unserved()
	over := make(chan error, 1)
	go func() {
		_, _, err := agent.Recv()
		over <- err
	}()
	<-sent // Recv asks for more
	agent.Close()
	<-over
}

// A session that ends releases those who wait for its messages, whether its end was read or not.
func TestUnservedAtTheEnd(t *testing.T) {
	agent, raw := rawPair(t)
	if _, err := raw.Write([]byte{0, 0, 0, 9, 1}); err != nil { // of a frame
		t.Fatal(err)
	}
	half := agent.Unserved()
	if ended(half) {
		t.Error("half a frame counts as nothing")
	}
	raw.Close()
	if _, _, err := agent.Recv(); err == nil {
		t.Error("half a frame was received")
	}
	if !ended(half) || agent.Unserved() != nil {
		t.Error("a session whose end was read is waited for")
	}
	agent, client := sessionPair(t)
	if err := client.Send(&Ping{Req: 1}); err != nil {
		t.Fatal(err)
	}
	sent := agent.Unserved()
	agent.Close()
	if !ended(sent) || agent.Unserved() != nil {
		t.Error("a session that was closed is waited for")
	}
}
