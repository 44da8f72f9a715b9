package agent

import "time"

// goneLook is how often an import under way looks whether its engine is still there: nobody reads
// the session's socket meanwhile.
const goneLook = 20 * time.Millisecond

// watchGone gives a channel that is closed when the peer has died or hung up, or the session is to
// end. unwatch ends the watch.
func (s *session) watchGone() (gone <-chan struct{}, unwatch func()) {
	noticed, over, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(goneLook)
		defer tick.Stop()
		for !s.conn.HungUp() {
			select {
			case <-over:
				return
			case <-s.gone:
				close(noticed)
				return
			case <-s.conn.Dead():
				close(noticed)
				return
			case <-tick.C:
			}
		}
		close(noticed)
	}()
	return noticed, func() {
		close(over)
		<-ended
	}
}
