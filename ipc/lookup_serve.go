package ipc

import (
	"errors"
	"fmt"
	"time"
)

// serve is the goroutine that owns the sockets.
func (s *LookupServer) serve() {
	defer close(s.done)
	for {
		err := s.rx.receive(s.router, -1)
		if s.closing.Load() {
			return
		}
		if err != nil {
			s.err = fmt.Errorf("look-up socket %s: %w", s.Path(), err)
			return
		}
		s.answer()
		s.rx.trim()
	}
}

// answer replies to the message in rx: [identity, empty, request...], as a REQ or a DEALER sends it.
func (s *LookupServer) answer() {
	f := s.rx.frames()
	s.count.requests.Add(1)
	if f.Len() == 0 { // no memory even for the identity
		s.count.unsent.Add(1)
		return
	}
	s.reply.Reset()
	s.reply.Add(f.At(0))
	body, enveloped := f.From(1), f.Len() > 1 && len(f.At(1)) == 0
	if enveloped {
		s.reply.end()
		body = f.From(2)
	}
	err := s.parse(&body, enveloped)
	s.count.forms[s.request.Form].Add(1)
	a := LookupReply{Status: LookupMalformed, Boot: s.o.Boot}
	if err == nil {
		a = s.handle()
	} else {
		s.malformed(err)
	}
	s.reply.Buf = AppendReply(s.reply.Buf, &s.request, a)
	s.reply.end()
	if sendFrames(s.router, &s.reply) != nil {
		s.count.unsent.Add(1)
		if s.o.OnUnsent != nil {
			s.o.OnUnsent(a)
		}
	}
}

func (s *LookupServer) parse(body *Frames, enveloped bool) error {
	if !enveloped {
		s.request = LookupRequest{}
		return &MalformedError{ReasonEnvelope, "look-up", "", "no empty frame before the request, as REQ sends it"}
	}
	frames, bytes, over := s.rx.received()
	if !over {
		return s.parser.Parse(body, &s.request)
	}
	s.request = LookupRequest{}
	if body.Len() > 0 {
		head := body.At(0)
		s.request.Form = tell(frames-envelopeFrames, head, len(head))
		s.request.Version = ownVersion(s.request.Form, head)
	}
	return &MalformedError{ReasonTooLarge, "look-up", "", fmt.Sprintf("%d frames, %d bytes, allowed is 1 to %d and %d",
		frames-envelopeFrames, bytes, MaxLookupFrames, MaxLookupBytes)}
}

// handle asks the handler; a panic of it is an overload to the client.
func (s *LookupServer) handle() (a LookupReply) {
	defer func() {
		if v := recover(); v != nil {
			s.count.panics.Add(1)
			a = LookupReply{Status: LookupOverloaded, Boot: s.o.Boot}
			if s.o.OnPanic != nil {
				s.o.OnPanic(v)
			}
		}
	}()
	return s.handler(&s.request)
}

// malformed counts, and tells at a bounded rate.
func (s *LookupServer) malformed(err error) {
	var m *MalformedError
	if errors.As(err, &m) {
		s.count.reasons[m.Reason].Add(1)
	}
	if s.o.OnMalformed == nil {
		return
	}
	now := time.Now()
	if now.Before(s.quiet.until) {
		s.quiet.skipped++
		return
	}
	s.o.OnMalformed(err, s.quiet.skipped)
	s.quiet.until, s.quiet.skipped = now.Add(MalformedLogInterval), 0
}
