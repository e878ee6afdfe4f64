package dispatch_test

import (
	"errors"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/uverbsd/uverbsd/abi"
	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca"
	"github.com/uverbsd/uverbsd/hca/loop"
)

// read is one read(2) of an event file, which must not wait.
func read(h dispatch.Handle) answer {
	r := newRequest(100)
	r.flags = unix.O_NONBLOCK
	h.Read(r, 64)
	return <-r.ch
}

func poll(h dispatch.Handle, kh uint64) uint32 {
	r := newRequest(100)
	h.Poll(r, kh, true)
	return (<-r.ch).revents
}

// asyncEvent is the next event of an asynchronous event file.
func asyncEvent(t *testing.T, h dispatch.Handle) (element uint64, typ uint32) {
	t.Helper()
	a := read(h)
	if a.errno != 0 || len(a.data) != 16 {
		t.Fatalf("no event: %+v", a)
	}
	e := decode[abi.AsyncEvent](a.data)
	return e.Element, e.EventType
}

// After a removal each command answers as the kernel's does: those that destroy
// work, the others know the handle, and say EIO.
func TestCommandsAfterRemove(t *testing.T) {
	g := newRig(t)
	c, s := g.stocked(100)
	plain := g.client(200) // without a context
	g.dev.Remove()
	if n := g.hca.count(); len(n) != 0 {
		t.Fatalf("left on the device: %v", n)
	}
	if _, err := g.dev.Open(newRequest(100)); !errors.Is(err, unix.ENXIO) {
		t.Errorf("open: %v", err)
	}
	plain.cmd(unix.EIO, abi.CmdAllocPD, 4, raw(abi.AllocPD{Response: resp}))
	plain.cmd(unix.EIO, abi.CmdGetContext, 8, raw(abi.GetContext{Response: resp}))
	plain.cmd(unix.ENOENT, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: s["pd"]}))
	for name, b := range everyCommand(s) {
		want := unix.EIO
		switch name {
		case "ex CREATE_FLOW", "ex CREATE_WQ", "ex CREATE_IND", "ex DESTROY_WQ":
			want = unix.EOPNOTSUPP
		}
		if a := c.write(b); a.errno != want {
			t.Errorf("%s: %v, want %v", name, a.errno, want)
		}
	}
	// An unknown handle is unknown, one of another kind is that, before all else.
	c.cmd(unix.ENOENT, abi.CmdQueryQP, 128, raw(abi.QueryQP{Response: resp, QPHandle: 9999}))
	c.cmd(unix.EINVAL, abi.CmdQueryQP, 128, raw(abi.QueryQP{Response: resp, QPHandle: s["pd"]}))
	// The PD first, which would be EBUSY.
	for _, d := range []struct {
		num  uint32
		kind string
	}{{abi.CmdDeallocPD, "pd"}, {abi.CmdDeregMR, "mr"}, {abi.CmdDeallocMW, "mw"}, {abi.CmdDestroyAH, "ah"}, {abi.CmdCloseXRCD, "xrcd"}} {
		c.cmd(0, d.num, 0, raw(abi.Handle{Handle: s[d.kind]}))
		c.cmd(unix.ENOENT, d.num, 0, raw(abi.Handle{Handle: s[d.kind]}))
	}
	c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: s["cq"]}))
	for _, qp := range []string{"qp", "ud qp"} {
		c.cmd(0, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: s[qp]}))
		c.cmd(unix.ENOENT, abi.CmdDestroyQP, 4, raw(abi.DestroyQP{Response: resp, QPHandle: s[qp]}))
	}
	c.cmd(0, abi.CmdDestroySRQ, 4, raw(abi.DestroyQP{Response: resp, QPHandle: s["srq"]}))
	c.h.Release()
	plain.h.Release()
	g.empty()
}

// What was charged is given back by the removal, once.
func TestRemoveGivesBack(t *testing.T) {
	g := newRig(t)
	c, _ := g.stocked(100)
	async := g.opened[g.nextFD] // the one descriptor that was made
	c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
	if g.users.Held(1000) == 0 || g.pins.Pinned("100") == 0 {
		t.Fatal("nothing charged: the test is void")
	}
	g.dev.Remove()
	// The last event is unread, and costs.
	if held, pinned := g.users.Held(1000), g.pins.Pinned("100"); held > 64 || pinned != 0 {
		t.Errorf("held %d, pinned %d", held, pinned)
	}
	f := g.dev.Files()
	if len(f) != 1 || f[0].Pinned != 0 || f[0].Objects["pd"] != 0 {
		t.Errorf("status: %+v", f)
	}
	g.dev.Remove() // again: nothing
	asyncEvent(t, async)
	if held := g.users.Held(1000); held != 0 {
		t.Errorf("held %d", held)
	}
	c.h.Release()
	g.empty()
	if held := g.users.Held(1000); held != 0 {
		t.Errorf("after the release: held %d", held)
	}
}

// A removal tells: the last event of the asynchronous file is DEVICE_FATAL,
// whatever else is unread; channels answer EIO, also who waits.
func TestRemoveEvents(t *testing.T) {
	for _, tc := range []struct {
		name  string
		ports int // unread port events before
	}{{"none before", 0}, {"some before", 2}, {"full", dispatch.MaxEvents + 10}} {
		t.Run(tc.name, func(t *testing.T) {
			g := newRig(t)
			c := g.client(100)
			async := g.opened[int(c.context().AsyncFD)]
			c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
			fd := out[abi.CreateCompChannelResp](c).FD
			channel := g.opened[int(fd)]
			cq := c.cq(int32(fd))
			for range tc.ports {
				g.hca.last.PortEvent(hca.EventPortActive, 1)
			}
			waits := newRequest(100)
			channel.Read(waits, 64)
			if ev := poll(channel, 7); ev != 0 {
				t.Errorf("channel: poll %#x", ev)
			}
			if tc.ports == 0 {
				if ev := poll(async, 8); ev != 0 {
					t.Errorf("async: poll %#x", ev)
				}
			}
			g.dev.Remove()
			if a := <-waits.ch; a.errno != unix.EIO {
				t.Errorf("the read that waited: %+v", a)
			}
			if a := read(channel); a.errno != unix.EIO {
				t.Errorf("channel: %+v", a)
			}
			if ev := poll(channel, 7); ev != unix.POLLERR {
				t.Errorf("channel: poll %#x", ev)
			}
			g.mu.Lock()
			if g.woken[7] != 1 || tc.ports == 0 && g.woken[8] != 1 {
				t.Errorf("woken: %v", g.woken)
			}
			g.mu.Unlock()
			if ev := poll(async, 8); ev&unix.POLLIN == 0 {
				t.Errorf("async: poll %#x", ev)
			}
			for range min(tc.ports, dispatch.MaxEvents) {
				if _, typ := asyncEvent(t, async); typ == uint32(hca.EventDeviceFatal) {
					t.Fatal("the last event came early")
				}
			}
			if element, typ := asyncEvent(t, async); typ != uint32(hca.EventDeviceFatal) || element != 0 {
				t.Errorf("event %d of %d", typ, element)
			}
			// The kernel's file stays open for good; nothing comes any more.
			if a := read(async); a.errno != unix.EAGAIN {
				t.Errorf("after the last: %+v", a)
			}
			if ev := poll(async, 8); ev != 0 {
				t.Errorf("after the last: poll %#x", ev)
			}
			c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
			c.h.Release()
			if a := read(async); a.errno != unix.EIO {
				t.Errorf("after the release: %+v", a)
			}
			async.Release()
			channel.Release()
			g.empty()
		})
	}
}

// The last event outlives the command file, and goes to who waits for it.
func TestRemoveLastEvent(t *testing.T) {
	g := newRig(t)
	c, d := g.client(100), g.client(200)
	async := g.opened[int(c.context().AsyncFD)]
	waiting := g.opened[int(d.context().AsyncFD)]
	waits := newRequest(200)
	waiting.Read(waits, 64)
	g.dev.Remove()
	if a := <-waits.ch; a.errno != 0 || decode[abi.AsyncEvent](a.data).EventType != uint32(hca.EventDeviceFatal) {
		t.Errorf("the read that waited: %+v", a)
	}
	c.h.Release()
	if ev := poll(async, 1); ev&unix.POLLIN == 0 {
		t.Errorf("poll %#x", ev)
	}
	if _, typ := asyncEvent(t, async); typ != uint32(hca.EventDeviceFatal) {
		t.Errorf("event %d", typ)
	}
	if a := read(async); a.errno != unix.EIO {
		t.Errorf("after the last: %+v", a)
	}
	if ev := poll(async, 1); ev != unix.POLLERR {
		t.Errorf("after the last: poll %#x", ev)
	}
	d.h.Release()
	g.empty()
}

// A destroy after the removal says how many events were read before it.
func TestRemoveEventCounts(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	c.cmd(0, abi.CmdCreateCompChannel, 4, raw(abi.CreateCompChannel{Response: resp}))
	fd := out[abi.CreateCompChannelResp](c).FD
	channel := g.opened[int(fd)]
	cq, pd := c.cq(int32(fd)), c.pd()
	qp := c.qp(pd, cq, hca.QPTypeRC)
	flush := func() { // a receive that is flushed makes a completion and its event
		c.cmd(0, abi.CmdReqNotifyCQ, 0, raw(abi.ReqNotifyCQ{CQHandle: cq}))
		c.cmd(0, abi.CmdPostRecv, 4, raw(abi.PostSend{Response: resp, QPHandle: qp.QPHandle, WRCount: 1, WQESize: 16}), make([]byte, 16))
	}
	c.connect(qp.QPHandle, qp.QPN, 1)
	c.cmd(0, abi.CmdModifyQP, 0, raw(abi.ModifyQP{QPHandle: qp.QPHandle, QPState: uint8(hca.QPErr), AttrMask: uint32(hca.QPMaskState)}))
	flush()
	if a := waitEvent(channel); a.errno != 0 {
		t.Fatalf("no completion event: %+v", a)
	}
	flush() // stays unread, and goes
	g.dev.Remove()
	c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: cq}))
	if r := out[abi.DestroyCQResp](c); r.CompEventsReported != 1 || r.AsyncEventsReported != 0 {
		t.Errorf("%+v", r)
	}
	c.h.Release()
	g.empty()
}

// waitEvent reads an event that comes.
func waitEvent(h dispatch.Handle) answer {
	r := newRequest(100)
	h.Read(r, 64)
	return <-r.ch
}

// A POLL_CQ that waits is answered, with nothing.
func TestRemoveParkedPoll(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	cq := c.cq(-1)
	b := pack(abi.CmdPollCQ, 8+48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1}))
	r := newRequest(100)
	c.h.Write(r, b)
	g.dev.Remove()
	if a := <-r.ch; a.errno != 0 || a.n != len(b) || out[abi.PollCQResp](c).Count != 0 {
		t.Errorf("%+v", a)
	}
	c.cmd(unix.EIO, abi.CmdPollCQ, 8+48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1}))
	c.h.Release()
	g.empty()
}

// Commands under way end before anything is destroyed under them.
func TestRemoveAwaitsCommands(t *testing.T) {
	g := newRig(t)
	c := g.client(100)
	c.context()
	pd := c.pd()
	inside, leave := make(chan struct{}), make(chan struct{})
	c.p.checking = func() { close(inside); <-leave }
	done := make(chan answer)
	go func() {
		done <- c.write(pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: 0x10000 + 8*page, HCAVA: 0x10000 + 8*page, Length: page, PDHandle: pd, AccessFlags: 1})))
	}()
	<-inside
	removed := make(chan struct{})
	go func() { g.dev.Remove(); close(removed) }()
	for c.writeFrom(101, pack(abi.CmdQueryDevice, 176, raw(abi.QueryDevice{Response: resp}))).errno == 0 {
		// until it has begun
	}
	if n := g.hca.count()["pd"]; n != 1 {
		t.Errorf("%d PDs under a command that uses one", n)
	}
	close(leave)
	<-done // it may have made its region, or found the table closed
	<-removed
	if n := g.hca.count(); len(n) != 0 {
		t.Errorf("left on the device: %v", n)
	}
	c.h.Release()
	g.empty()
}

// A command that is stuck in its client's memory holds up neither the removal,
// nor anybody else; what it uses goes when it ends.
func TestRemoveUnderStuckCommand(t *testing.T) {
	for _, tc := range []struct {
		name    string
		release bool // the file goes before the command
	}{{"command ends", false}, {"file closed first", true}} {
		t.Run(tc.name, func(t *testing.T) {
			g := newRig(t)
			c, s := g.stocked(100)
			other, _ := g.stocked(200)
			inside, leave := make(chan struct{}), make(chan struct{})
			c.p.checking = func() { close(inside); <-leave }
			r := newRequest(100)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				c.h.Write(r, pack(abi.CmdRegMR, 12, raw(abi.RegMR{Response: resp, Start: 0x10000 + 8*page, HCAVA: 0x10000 + 8*page, Length: page, PDHandle: s["pd"], AccessFlags: 1})))
			}()
			<-inside
			g.dev.Remove()
			left := g.hca.count()
			if left["pd"] != 1 || left["cq"] != 0 || left["qp"] != 0 {
				t.Errorf("left on the device: %v, want the PD that the command uses", left)
			}
			c.cmd(0, abi.CmdDestroyCQ, 8, raw(abi.DestroyCQ{Response: resp, CQHandle: s["cq"]}))
			c.cmd(unix.EBUSY, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: s["pd"]}))
			other.h.Release()
			if tc.release {
				r.killed.Store(true)
				c.h.Release()
			}
			close(leave)
			<-ended
			if a := <-r.ch; a.errno == 0 {
				t.Errorf("the command: %+v", a)
			}
			if n := g.hca.count(); len(n) != 0 {
				t.Errorf("left on the device: %v", n)
			}
			if !tc.release {
				c.cmd(0, abi.CmdDeallocPD, 0, raw(abi.Handle{Handle: s["pd"]}))
				c.h.Release()
			}
			g.empty()
		})
	}
}

// A GET_CONTEXT that is under way gets its context, and is told.
func TestRemoveDuringGetContext(t *testing.T) {
	for _, late := range []bool{false, true} {
		g := newRig(t)
		c := g.client(100)
		removed := make(chan struct{})
		g.beforeOpen = func() {
			go func() { g.dev.Remove(); close(removed) }()
			if late { // Remove has given up on it
				<-removed
			}
		}
		r := c.context()
		<-removed
		async := g.opened[int(r.AsyncFD)]
		if _, typ := asyncEvent(t, async); typ != uint32(hca.EventDeviceFatal) {
			t.Errorf("event %d", typ)
		}
		if n := g.hca.count(); len(n) != 0 {
			t.Errorf("left on the device: %v", n)
		}
		c.h.Release()
		g.empty()
	}
}

// A removal in the midst of clients that do all there is: nothing is left, and
// nobody hangs.
func TestRemoveInTraffic(t *testing.T) {
	g := newRig(t)
	stop := make(chan struct{})
	var clients []*client
	var stocks []stock
	for i := range 4 {
		c, s := g.stocked(100 * (i + 1))
		clients, stocks = append(clients, c), append(stocks, s)
	}
	var wg, begun sync.WaitGroup
	for i, c := range clients {
		commands := everyCommand(stocks[i])
		delete(commands, "CREATE_COMP_CHNL") // the fake machine makes one descriptor at a time
		for k := range 2 {
			tid := c.p.pid + k
			begun.Add(1)
			wg.Go(func() {
				for round := 0; ; round++ {
					for _, b := range commands {
						r := newRequest(tid)
						c.h.Write(r, b)
						<-r.ch
					}
					if round == 0 {
						begun.Done()
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
	}
	begun.Wait()
	g.dev.Remove()
	if n := g.hca.count(); len(n) != 0 {
		t.Errorf("left on the device: %v", n)
	}
	close(stop)
	wg.Wait()
	if n := g.hca.count(); len(n) != 0 {
		t.Errorf("left on the device: %v", n)
	}
	for _, c := range clients {
		c.h.Release()
	}
	g.empty()
}

// A device that goes while others on the fabric send to it: their requests end
// with an error, those that waited for a receive and those that come later.
func TestRemovePeer(t *testing.T) {
	fabric := loop.New(hca.LinkInfiniBand)
	g, peer := newRigOn(t, fabric, 1, dispatch.DefaultLimits()), newRigOn(t, fabric, 2, dispatch.DefaultLimits())
	c, o := g.client(100), peer.client(100)
	c.context()
	o.context()
	pd, cq, opd, ocq := c.pd(), c.cq(-1), o.pd(), o.cq(-1)
	mr := c.mr(pd, 0x10000+4*page, page, hca.AccessLocalWrite)
	send := func(qp uint32) {
		a := c.write(post(abi.CmdPostSend, qp, 56, [][]byte{raw(abi.SendWR{NumSGE: 1, Opcode: uint32(hca.OpSend), SendFlags: uint32(hca.SendSignaled)})},
			[]abi.SGE{{Addr: 0x10000 + 4*page, Length: 8, LKey: mr.LKey}}))
		if a.errno != 0 {
			t.Fatalf("post: %+v", a)
		}
	}
	failed := func(what string) {
		for { // bounded: timeout 14 is 67 ms, eight times
			c.cmd(0, abi.CmdPollCQ, 8+48, raw(abi.PollCQ{Response: resp, CQHandle: cq, NE: 1}))
			if out[abi.PollCQResp](c).Count == 1 {
				break
			}
		}
		if wc := out[struct {
			abi.PollCQResp
			abi.WC
		}](c); wc.Status != uint32(hca.WCRetryExcErr) {
			t.Errorf("%s: status %d", what, wc.Status)
		}
	}
	var qps []uint32
	for range 2 {
		mine, theirs := c.qp(pd, cq, hca.QPTypeRC), o.qp(opd, ocq, hca.QPTypeRC)
		c.connect(mine.QPHandle, theirs.QPN, 2)
		o.connect(theirs.QPHandle, mine.QPN, 1)
		qps = append(qps, mine.QPHandle)
	}
	send(qps[0]) // there is no receive for it
	peer.dev.Remove()
	if err := peer.engine.Close(); err != nil {
		t.Error(err)
	}
	failed("a request that waited")
	send(qps[1])
	failed("a request that came later")
	c.h.Release()
	o.h.Release()
	g.empty()
	peer.empty()
}
