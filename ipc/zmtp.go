package ipc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// ZMTP 3.0, as much of it as a ROUTER speaks with REQ, DEALER and ROUTER peers:
// https://rfc.zeromq.org/spec/23.
//
//	greeting   ff 0000000000000001 7f | 3 0 | "NULL" in 20 bytes | 0 | 31 zeros
//	frame      flags, length in 1 byte or, LONG, 8 of big endian, body
//	READY      a COMMAND frame: 5 "READY", then properties: length, name, length in 4 bytes, value

// Flags of a frame.
const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
)

const (
	greetingBytes   = 64
	greetingVersion = 10 // offset of the major version
	greetingName    = 12 // offset of the mechanism, 20 bytes
	greetingNameLen = 20
	maxZMTPCommand  = 1024 // bytes of a command
	maxPingContext  = 16
	pingHead        = 5 + 2 // name and time to live
)

// errZMTP is wrapped by the error that ends a connection whose peer violates ZMTP.
var errZMTP = errors.New("not ZMTP 3 as a REQ or DEALER speaks it")

var zmtpGreeting = func() (b [greetingBytes]byte) {
	b[0], b[8], b[9] = 0xff, 1, 0x7f
	b[greetingVersion] = 3
	copy(b[greetingName:], "NULL")
	return b
}()

// zmtpReady is the command with which a ROUTER ends the handshake.
var zmtpReady = readyCommand("ROUTER")

func readyCommand(socketType string) []byte {
	const name = "Socket-Type"
	body := append([]byte("\x05READY"), byte(len(name)))
	body = append(body, name...)
	body = binary.BigEndian.AppendUint32(body, uint32(len(socketType)))
	body = append(body, socketType...)
	return append([]byte{zmtpCommand, byte(len(body))}, body...)
}

// checkGreeting checks that a peer's greeting is ZMTP 3 without security.
func checkGreeting(b []byte) error {
	switch {
	case b[0] != 0xff || b[9]&1 == 0:
		return fmt.Errorf("signature %x: %w", b[:10], errZMTP)
	case b[greetingVersion] < 3:
		return fmt.Errorf("version %d, allowed is 3: %w", b[greetingVersion], errZMTP)
	case string(bytes.TrimRight(b[greetingName:greetingName+greetingNameLen], "\x00")) != "NULL":
		return fmt.Errorf("mechanism %q, allowed is NULL: %w", b[greetingName:greetingName+greetingNameLen], errZMTP)
	}
	return nil
}

// checkReady checks that the command that ends a peer's handshake is READY, of a socket type that
// may ask.
func checkReady(body []byte) error {
	rest, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if !ok {
		return fmt.Errorf("%d bytes of a command that is not READY: %w", len(body), errZMTP)
	}
	for len(rest) > 0 {
		name, value, next, ok := cutProperty(rest)
		if !ok {
			return fmt.Errorf("READY with half a property: %w", errZMTP)
		}
		if bytes.EqualFold(name, []byte("Socket-Type")) {
			switch string(value) {
			case "REQ", "DEALER", "ROUTER":
				return nil
			}
			return fmt.Errorf("socket type %q, allowed is REQ, DEALER, ROUTER: %w", value, errZMTP)
		}
		rest = next
	}
	return fmt.Errorf("READY without a socket type: %w", errZMTP)
}

func cutProperty(b []byte) (name, value, rest []byte, ok bool) {
	n := int(b[0])
	if len(b) < 1+n+4 {
		return nil, nil, nil, false
	}
	name, b = b[1:1+n], b[1+n:]
	size := binary.BigEndian.Uint32(b)
	if b = b[4:]; uint64(size) > uint64(len(b)) {
		return nil, nil, nil, false
	}
	return name, b[:size], b[size:], true
}

// pong returns the frame that answers a PING, nil if the command is none.
func pong(command []byte) []byte {
	rest, ok := bytes.CutPrefix(command, []byte("\x04PING"))
	if !ok || len(command) < pingHead || len(command) > pingHead+maxPingContext {
		return nil
	}
	body := append([]byte("\x04PONG"), rest[2:]...)
	return append([]byte{zmtpCommand, byte(len(body))}, body...)
}
